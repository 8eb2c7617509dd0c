"""FSSDP that was asked for is on before the first optimizer step, or it is an error.

Oracle: the same model without FSSDP, or literal messages.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import io
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tiny_gpt
import torch
from ranks import ranks

from megatron_hecate import HecateConfig, fssdp
from megatron_hecate.__main__ import main

DENSE = dict(
    num_moe_experts=None,
    moe_ffn_hidden_size=None,
    expert_model_parallel_size=1,
    moe_router_dtype=None,
)
OFF = r"it was asked for, and SGD is about to step while no model .*; call megatron_hecate.fssdp\(HecateConfig\(...\)\)"


def _install(**flags: bool) -> Any:
    """Watch what wraps models, with flags of our launcher; returns the request, which holds them."""
    from megatron_hecate.switch_on import entry  # noqa: F401
    from megatron_hecate.switch_on.request import REQUEST

    REQUEST.flags.update(flags)
    return REQUEST


@pytest.mark.parametrize("kind", ["bf16", "chunks"])
@ranks(4)
def test_a_model_is_converted_where_it_is_wrapped(kind: str) -> None:
    """Behind Float16Module too, and with all chunks of a rank, of which each is wrapped by itself."""
    case = tiny_gpt.Case(pp=2, vpp=2, accumulate=4)
    if kind == "bf16":
        case = tiny_gpt.Case(bf16=True, distributed_optimizer=True, overlap=True, accumulate=2)
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case)
    request = _install()
    untouched = tiny_gpt.train(case, steps=1)
    layers = tiny_gpt.moe_layers(untouched.chunks)
    assert not any(hasattr(layer, "fssdp") for layer in layers), "nobody asked for it"
    request.flags.update(moe_fssdp=True, moe_fssdp_speeds=tiny_gpt.FREE, moe_fssdp_slots=3)
    ours = tiny_gpt.train(case)
    assert {layer.fssdp.config.slots for layer in tiny_gpt.moe_layers(ours.chunks)} == {3}
    tolerance = tiny_gpt.BF16_TOLERANCE if case.bf16 else 1e-5
    tiny_gpt.assert_trained_alike(stock, ours, tolerance=tolerance)
    assert not request.is_unmet


@pytest.mark.fast
@pytest.mark.parametrize("skip_train", [False, True])
def test_a_job_that_only_evaluates_wraps_no_model(
    skip_train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: Megatron's ``--skip-train``, with which nothing is left to switch on."""
    from megatron_hecate.switch_on.request import Request

    variables = types.ModuleType("megatron.training.global_vars")
    variables._GLOBAL_ARGS = argparse.Namespace(moe_fssdp=True, skip_train=skip_train)
    monkeypatch.setitem(sys.modules, variables.__name__, variables)
    request = Request()
    assert request.is_made and request.is_unmet == (not skip_train)


@ranks(4)
def test_chunks_that_are_out_of_sight_are_an_error() -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    case = tiny_gpt.initialized(pp=2, vpp=2)
    _install(moe_fssdp=True)
    first = tiny_gpt.build(case)[0].pop(0)
    with pytest.raises(
        ValueError, match="this rank's model has 2 chunks, of which only one is in sight when"
    ):
        DistributedDataParallel(first.config, DistributedDataParallelConfig(), first)


@ranks(2)
def test_a_step_without_fssdp_is_an_error() -> None:
    """Of a model that nothing of Megatron's wraps; and of a dense one, which has nothing to convert."""
    case = tiny_gpt.initialized()
    request = _install()
    chunks, _ = tiny_gpt.build(case)
    optimizer = torch.optim.SGD(chunks[0].parameters(), lr=0.1)
    optimizer.step()  # nobody asked for it
    for flag in ("moe_fssdp", "moe_fssdp_observe"):
        request.flags.clear()
        request.flags[flag] = True
        with pytest.raises(ValueError, match=OFF):
            optimizer.step()
    request.flags.clear()
    request.flags["moe_fssdp"] = True
    dense = dataclasses.replace(case, settings=tuple(DENSE.items()))
    with pytest.raises(ValueError, match=OFF.replace("SGD", "FusedAdam")):
        tiny_gpt.train(dense, steps=1)
    fssdp(HecateConfig(slots=1, speeds=tiny_gpt.FREE))(chunks)
    optimizer.step()
    tiny_gpt.train(dense, steps=1)  # beside a model that is on: a critic


@ranks(2)
def test_a_subclass_of_ddp_that_passes_on_its_arguments() -> None:
    """As a framework's; and a copy of what wraps a model converts nothing."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    class Wrapper(DistributedDataParallel):
        def __init__(self, *args: object, label: str, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.label = label

    case = tiny_gpt.initialized()
    request = _install()
    settings = DistributedDataParallelConfig()
    for named in (False, True):
        chunks, config = tiny_gpt.build(case)
        stock = DistributedDataParallel(config, settings, chunks[0])
        assert type(copy.copy(stock)) is DistributedDataParallel
        assert not any(hasattr(layer, "fssdp") for layer in tiny_gpt.moe_layers(chunks))
        (chunk,), config = tiny_gpt.build(case)
        request.flags = {"moe_fssdp": True, "moe_fssdp_slots": 1}
        if named:
            Wrapper(label="", config=config, ddp_config=settings, module=chunk)
        else:
            Wrapper(config, settings, chunk, label="")
        assert all(hasattr(layer, "fssdp") for layer in tiny_gpt.moe_layers([chunk]))
        request.flags = {}


@ranks(2)
def test_megatron_fsdp_is_refused_where_it_wraps() -> None:
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel

    class TorchFullyShardedDataParallel(_BaseDataParallel):
        """Wraps what it is given, as Megatron's class of this name."""

    case = tiny_gpt.initialized()
    _install(moe_fssdp=True)
    chunks, config = tiny_gpt.build(case)
    with pytest.raises(ValueError, match="use_torch_fsdp2=True: FSDP2 owns the expert weights"):
        TorchFullyShardedDataParallel(config, chunks[0])


@pytest.mark.newest
@ranks(1)
def test_modules_and_console_commands() -> None:
    """As Python and the command itself would run them: arguments, folder, exit status."""
    import megatron_on_cpu

    megatron_on_cpu.install()
    import megatron.training.training  # noqa: F401

    megatron_on_cpu.for_training()
    folder = Path(os.environ["TEST_FOLDER"])
    report = "import sys\ndef main():\n print(__name__, sys.argv, sys.path[0], 'moe_fssdp' in _flags())\n return {}\n"
    report += "def _flags():\n from megatron_hecate.switch_on.request import REQUEST\n return REQUEST.flags\n"
    head = f"#!{sys.executable}\nimport sys\n"
    for name, text in {
        "pack/__init__.py": "",
        "pack/inner.py": report.format(0) + "if __name__ == '__main__':\n sys.exit(main())\n",
        "pack/__main__.py": "import sys; print(sys.path[0])\n",
        "pack/failing.py": report.format(7),
        "plain/file": "",  # Python runs no such folder
        "bin/plain": head + "print(__name__, __file__)\n",
        "bin/train-pack": head + "from pack.inner import main\nsys.exit(main())\n",
        "bin/fail-pack": head + "from pack.failing import main\nsys.exit(main())\n",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    os.chdir(folder)
    sys.path.insert(1, str(folder))
    os.environ["PATH"] += os.pathsep + str(folder / "bin")

    def run(*arguments: str) -> tuple[int, str]:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                status = main([*arguments])
            except SystemExit as done:
                status = done.code
        return status, said.getvalue()

    words = "-m", "pack.inner", "-m", "x"
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run(*words) == (0, done.stdout), done.stderr
    status, said = run("--moe-fssdp", "--moe-fssdp-slots=3", "-m", "pack.inner", "a.py")
    assert f"__main__ ['{folder / 'pack' / 'inner.py'}', 'a.py'] {folder} True" in said
    assert status == 1 and "pack.inner built no model" in said, "it ends with sys.exit(0)"
    train = folder / "bin" / "train-pack"
    said = f"pack.inner ['{train}', 'a'] {train.parent} False\n"
    assert run("train-pack", "a") == (0, said)
    assert run("--moe-fssdp-slots", "3", "fail-pack", "a.py")[0] == 7
    assert run("-m", "pack") == (0, f"{folder}\n")
    assert run("plain")[1] == f"__main__ {folder / 'bin' / 'plain'}\n"
    for words, message in {
        "torchrun train.py": "torchrun starts the ranks, so it must precede our launcher: torchrun ... -m "
        "megatron_hecate run ... -- SCRIPT.py\n",
        "-m torch.distributed.run": "torch.distributed.run starts the ranks",
        "-m no_such_module.inner": "there is no module no_such_module",
    }.items():
        status, said = run(*words.split())
        assert status == 2 and message in said, (words, said)
