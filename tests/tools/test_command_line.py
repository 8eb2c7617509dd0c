"""``check -- SCRIPT.py ARGUMENTS``: the verdict of the job's own switch-on, without a GPU and ranks.

Oracle: stock Megatron's ``parse_args`` and ``validate_args`` with the ranks that the job would have, and the rules that
the job applies to their result; literal lines for wrong words.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launch_flags
import pytest
import torch
from pretraining import ROOT

from megatron_hecate.switch_on import unsupported
from megatron_hecate.tools.verdict import judge

pytestmark = [pytest.mark.fast, pytest.mark.newest]

SCRIPTS = launch_flags.read()
# what Megatron's validation asks for besides, and the script leaves to its environment
COMPLETED = {"gpt-oss-20b": "--num-layers 16"}
BASE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-experts 8 --bf16"
GROUPED = "--moe-grouped-gemm --expert-model-parallel-size 4"
# flags that ``validate_args`` replaces by another one; ours is named as the user wrote it
RENAMED = dict.fromkeys(("enable_cuda_graph", "external_cuda_graph"), "cuda_graph_impl")
FLEX = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend"


@pytest.fixture
def check(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Exit status, and what was printed, for words behind ``check``."""
    import megatron.training.arguments  # noqa: F401

    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()

    def run(words: str) -> tuple[int, str]:
        status, out, err = cli("check", *words.split())
        return status, out + err

    return run


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Any:
    """Lines of the job's switch-on about arguments that stock Megatron has validated."""
    from megatron.training import arguments

    gpu = SimpleNamespace(major=10, minor=0)

    def run(flags: str, *, slots: int = 2) -> list[str]:
        # a multiple of the ranks that any layout needs
        ranks = math.prod(map(int, re.findall(r"-parallel-size (\d+)", flags)))
        with monkeypatch.context() as patched:
            # a job's GPU, TransformerEngine and ranks
            patched.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
            patched.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
            patched.setattr(arguments, "is_te_min_version", lambda *_, **__: True)
            patched.setenv("NVTE_CPU_OFFLOAD_V1", "1")
            combined = "--overlap-moe-expert-parallel-comm" in flags or "fsdp" in flags
            patched.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32" if combined else "1")
            patched.setenv("WORLD_SIZE", str(ranks))
            words = (
                f"{launch_flags.TRAINING} {flags} --seq-length 4096 --global-batch-size {8 * ranks}"
            )
            words += " --max-position-embeddings 4096 --cross-entropy-fusion-impl native"
            patched.setattr(sys, "argv", ["script.py", *words.split()])
            job = arguments.parse_args(ignore_unknown_args=True)
            arguments.validate_args(job)
        capsys.readouterr()
        return unsupported.find(job, slots=slots)

    return run


@pytest.mark.parametrize("name", SCRIPTS)
def test_public_scripts_as_their_job(name: str, check: Any, judged: Any) -> None:
    """Flags as their authors wrote them; the environment of a login node changes nothing."""
    flags = f"{SCRIPTS[name].flags} {COMPLETED.get(name, '')}"
    refused = judged(flags)
    assert bool(refused) == (name == "gpt-oss-20b")
    status, said = check(f"--moe-fssdp -- script.py {flags}")
    lines = [line for line in said.splitlines() if not line.startswith("note: ")]
    assert (status, lines) == (bool(refused), refused or ["would switch on"])


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (GROUPED, ()),
        ("", ("expert_model_parallel_size",)),
        (f"{GROUPED} --enable-cuda-graph", ("cuda_graph_impl",)),
        (f"{GROUPED} --cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router", ()),
        (f"{GROUPED} --cuda-graph-impl transformer_engine --cuda-graph-scope moe", ("cuda_graph_impl",)),
        (f"{GROUPED} --fp8-format hybrid", ("fp8_recipe",)),
        ("--expert-model-parallel-size 4 --fp8-format e4m3 --fp8-recipe mxfp8", ("moe_grouped_gemm",)),
        (f"{GROUPED} --cpu-offloading-num-layers 2", ("cpu_offloading",)),
        (f"{GROUPED} --use-megatron-fsdp --ckpt-format fsdp_dtensor", ("use_megatron_fsdp",)),
        (f"{GROUPED} {FLEX} deepep --moe-router-dtype fp32", ()),
        *(
            (f"{GROUPED} --no-check-for-nan-in-loss-and-grad {words}", ("cuda_graph_impl",))
            for words in (
                "--cuda-graph-impl full_iteration",
                "--cuda-graph-scope full_iteration",
                "--cuda-graph-modules full_iteration",
                "--enable-cuda-graph --cuda-graph-scope full_iteration",
                "--cuda-graph-impl none --cuda-graph-scope full_iteration",
                "--cuda-graph-impl local --cuda-graph-modules full_iteration",
            )
        ),
    ],
)  # fmt: skip
def test_settings_that_megatron_derives(
    flags: str, refused: tuple[str, ...], check: Any, judged: Any
) -> None:
    """As written, and as ``validate_args`` has changed them."""
    status, said = check(f"--moe-fssdp -- script.py {BASE} {flags}")
    assert status == bool(refused), said
    for lines in (judged(f"{BASE} {flags}"), said.splitlines() if status else []):
        names = [line.partition("with ")[2].partition("=")[0] for line in lines]
        assert tuple(RENAMED.get(name, name) for name in names) == refused


def test_graphs_in_files_as_their_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """All settings of CUDA graphs that Megatron accepts together. Oracle: its ``TransformerConfig``."""
    from megatron.core.transformer import transformer_config

    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda *_, **__: True)
    sizes: dict[str, Any] = dict(
        expert_model_parallel_size=4, num_moe_experts=8, moe_grouped_gemm=True, num_layers=2
    )
    model = dict(sizes, hidden_size=64, num_attention_heads=4, add_bias_linear=False, bf16=True)
    parts = (None, "full", "full_iteration", ["full_iteration"], ["attn"])
    choices = dict(
        cuda_graph_impl=(None, "none", "local", "transformer_engine", "full_iteration"),
        cuda_graph_scope=parts,
        cuda_graph_modules=parts,
        enable_cuda_graph=(None, True),
        external_cuda_graph=(None, True),
    )
    verdicts: Counter[bool] = Counter()
    for values in itertools.product(*choices.values()):
        pairs = zip(choices, values, strict=True)
        graphs = {name: value for name, value in pairs if value is not None}
        # such a scope is idle in older Megatron
        if list(graphs) == ["cuda_graph_impl", "cuda_graph_scope"] and values[0] == "none":
            continue
        with contextlib.suppress(AssertionError, ValueError):
            config: Any = None
            config = transformer_config.TransformerConfig(**model, **graphs)
        if config is not None:
            verdict = judge([{**sizes, **graphs}])
            assert not verdict.unknowns
            assert bool(verdict.refusals) == bool(unsupported.find(config, slots=2)), graphs
            verdicts[bool(verdict.refusals)] += 1
    assert verdicts[True] > 20 and verdicts[False] > 10, verdicts


def test_rules_about_our_flags(check: Any, judged: Any) -> None:
    """Moments in scaled precision do not move; without moves they are stock Megatron's matter."""
    flags = f"{BASE} {GROUPED} --use-distributed-optimizer --use-precision-aware-optimizer"
    flags += " --exp-avg-dtype fp8 --moe-fssdp"
    assert check(f"-- script.py {flags}") == (0, "would switch on\n")
    status, said = check(f"-- script.py {flags} --moe-fssdp-rehome 10")
    assert status == 1 and said.startswith("--moe-fssdp with exp_avg_dtype='fp8': "), said
    status, said = check(f"-- script.py {BASE} --moe-fssdp --moe-fssdp-slots 0")
    assert (status, said) == (0, "would switch on\n")
    assert judged(BASE, slots=0) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--", "check: a script must follow --, as in megatron-hecate check -- pretrain_gpt.py"),
        ("script.py --num-experts 8", "unrecognized arguments: script.py --num-experts 8; a job's command line follows --"),
        ("--settings a.json -- script.py", "error: give one of --settings FILE, --compile-for"),
        ("-- script.py --num-experts eight", "argument --num-experts: invalid int value: 'eight'"),
        ("-- script.py --moe-fssdp", "there is no --num-experts among Megatron's arguments, and FSSDP"),
        ("-- run_recipe.py --recipe x model.num_moe_experts=8", "--settings FILE; it does not know --recipe"),
        ("-- script.py --num-experts 8 --moe-fssdp-slot 2", "megatron-hecate run --help lists the flags"),
        ("-- script.py --yaml-cfg none.yaml", "Megatron cannot read the arguments: [Errno 2] No such file"),
    ],
)  # fmt: skip
def test_wrong_words_are_one_clear_error(words: str, message: str, check: Any) -> None:
    status, said = check(words)
    assert status == 2 and message in said.splitlines()[-1], said


def test_words_that_megatron_does_not_know_are_named(check: Any) -> None:
    """torchrun's own are not; the others are the script's, which this parser does not know."""
    arguments = f"{BASE} {GROUPED} @more --my-flag 3 --expert-model-paralel-size 8"
    status, said = check(
        f"-- torchrun --nproc-per-node 8 --tee 3 script.py {arguments} --moe-fssdp"
    )
    line = "note: Megatron does not know @more, --my-flag, --expert-model-paralel-size; the script"
    assert status == 0 and said == f"would switch on\n{line} itself must\n"


def test_a_file_of_megatrons_own(check: Any) -> None:
    """``--yaml-cfg``, which Megatron reads into sections."""
    pytest.importorskip("yaml")
    job: dict[str, Any] = dict(enable_msc=False, disable_msc_deprecated=False)
    job["language_model"] = dict(num_moe_experts=8, cuda_graph_impl="local")
    job["model_parallel"] = dict(expert_model_parallel_size=4)
    Path("job.yaml").write_text(json.dumps(job))
    status, said = check("--moe-fssdp -- script.py --yaml-cfg job.yaml")
    assert status == 1 and "--moe-fssdp with cuda_graph_impl='local': " in said
    assert "expert_model_parallel_size=" not in said and "note: " not in said


def test_megatron_is_searched_beside_the_script_first(tmp_path: Path) -> None:
    """As Python would; without one the way out is said."""
    (package := tmp_path / "megatron" / "training").mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "arguments.py").write_text("raise ImportError('this one')")
    (tmp_path / "script.py").touch()
    command = [sys.executable, "-m", "megatron_hecate", "check", "--", str(tmp_path / "script.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not done.stdout, done
    assert "megatron.training cannot be imported (this one); name the script by its" in done.stderr
