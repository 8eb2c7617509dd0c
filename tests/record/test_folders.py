"""Several models of a process record, each into a folder of its own.

Oracle: stock Megatron, bit for bit; the record of each model trained alone; the folders and lines, written out.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from ranks import ranks

from megatron_hecate import HecateConfig, fssdp
from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.record.job_sizes import folder_of_model
from megatron_hecate.record.run_folder import read

FOUR_EXPERTS = dict(experts=4)  # which one folder could not hold beside eight
SETTINGS = {"observe": dict(observe=True), "fssdp": dict(slots=2, overlap_degree=1)}


def _train_in_turn(cases: list, hooks: list) -> tuple[list, str]:
    """Two steps of each model, then one more of each; the runs, recorded, and what rank 0 printed of FSSDP."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        pairs = zip(cases, hooks, strict=True)
        runs = [tiny_gpt.train(case, steps=2, hook=hook) for case, hook in pairs]
    for run, hook in zip(runs, hooks, strict=True):
        run.step(2)
        run.read_params()
        if hook is not None:
            layer = tiny_gpt.moe_layers(run.chunks)[0]
            observer = getattr(layer.router, "observer", None)
            recorder = layer.prefetcher.monitor.recorder if observer is None else observer
            recorder.stage.close()
    dist.barrier()
    return runs, "".join(f"{x}\n" for x in out.getvalue().splitlines() if "FSSDP" in x)


@pytest.mark.parametrize("mode", SETTINGS)
@ranks(2)
def test_two_models_of_one_hook_are_both_recorded(mode: str) -> None:
    root = Path(os.environ["TEST_FOLDER"])
    cases = [tiny_gpt.Case(accumulate=2), tiny_gpt.Case(**FOUR_EXPERTS)]
    tiny_gpt.initialize(cases[0])

    def hook(name: str) -> Any:
        config = HecateConfig(speeds=tiny_gpt.FREE, record=root / name, **SETTINGS[mode])
        return fssdp(config)

    stock, _ = _train_in_turn(cases, [None, None])
    _train_in_turn(cases, [hook("first"), hook("second")])
    both, lines = _train_in_turn(cases, 2 * [hook("both")])
    for run, as_stock in zip(both, stock, strict=True):
        if mode == "observe":
            assert tiny_gpt.difference(as_stock, run) == tiny_gpt.SAME
        else:
            tiny_gpt.assert_trained_alike(as_stock, run)
    for name, single in (("both", "first"), ("both/model-2", "second")):
        record, expected = read(root / name), read(root / single)
        assert record.iteration.tolist() == [1, 2, 3]
        assert record.load.tolist() == expected.load.tolist() and record.load.any()
    if dist.get_rank() == 0:
        if mode == "observe":
            said = "FSSDP observes 2 MoE layers and is off; the record is "
            assert lines == f"{said}{root}/both\n{said}{root}/both/model-2\n"
        else:
            place = f"another model has {root}/both; the folder of this one is {root}/both/model-2"
            assert lines.endswith(f"\nFSSDP: {place}\n") and lines.count(" another model") == 1


@ranks(2)
def test_a_second_run_of_the_hook_counts_no_model() -> None:
    """Also where the model has a folder of its own, and after a model that was refused."""
    folder = Path(os.environ["TEST_FOLDER"], "run")
    case = tiny_gpt.initialized()
    hook = tiny_gpt.fssdp_hook(record=folder)
    with pytest.raises(ValueError, match="has no MoE layer"):
        hook(torch.nn.Linear(2, 2))
    models = [tiny_gpt.build(case, hook)[0] for _ in range(3)]
    for chunks in models:
        hook(chunks)
    dist.barrier()
    assert sorted(str(path.parents[1].relative_to(folder)) for path in folder.rglob("*.rows")) == [
        ".",
        "model-2",
        "model-3",
    ]


@pytest.mark.fast
def test_folders_are_counted_by_name_and_attempt() -> None:
    """Two hooks may name two folders, or one in two ways. A restart in the process begins anew."""
    Attempt.current().close()
    here = Path.cwd() / "run"
    asked = ["run", "other", f"{here}", "run/", "other"]
    expected = ["run", "other", f"{here}/model-2", "run/model-3", "other/model-2"]
    assert [folder_of_model(folder) for folder in asked] == expected
    Attempt.current().close()
    assert folder_of_model("run") == "run"
