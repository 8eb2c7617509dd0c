"""Loads from Megatron's own files. Oracle: what an observer counted in the same run; Megatron's own code writes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from ranks import ranks

from megatron_hecate.tools.megatron_files import read_any, read_megatron
from megatron_hecate.tools.run_folder import RunRecord


def _assert_same(found: RunRecord, observed: RunRecord, iterations: list[int]) -> None:
    assert found.iteration.tolist() == iterations
    rows = [observed.iteration.tolist().index(iteration) for iteration in iterations]
    assert found.load.tolist() == observed.load[rows].tolist()
    assert found.info.layers == observed.info.layers
    assert found.info.num_experts == observed.info.num_experts and found.info.ranks == observed.info.ranks


@pytest.mark.newest
@ranks(2, preload=False)
def test_files_of_a_run_hold_what_an_observer_counted() -> None:
    """A trace of the first three iterations, and tokens per expert of the second."""
    import te_on_cpu

    te_on_cpu.install()
    import tiny_gpt
    import torch.distributed as dist
    from megatron.core.transformer.moe import router_trace
    from megatron.training.activation_logging import ActivationLogger

    from megatron_hecate import HecateConfig, fssdp
    from megatron_hecate.tools import report
    from megatron_hecate.tools.run_folder import read
    from megatron_hecate.tools.what_if import read_loads

    folder, rank = Path(os.environ["TEST_FOLDER"]), dist.get_rank()
    case = tiny_gpt.Case(accumulate=2, grouped=True)
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=0, hook=fssdp(HecateConfig(observe=True, record=f"{folder}/run")))
    tracer = router_trace.RouterTracer(f"{folder}/trace", 3, rank, training_mode=True)
    tracer.register_hooks(run.chunks)
    logger = ActivationLogger(f"{folder}/saved")
    for step in range(4):
        if step == 1:
            logger.register_tpe_hooks(run.chunks)
        run.step(step)
        if step == 1:
            logger.save_tpe(step + 1)  # as Megatron's loop numbers them
            logger.remove_tpe_hooks()
        tracer.advance_step(step)
    tiny_gpt.moe_layers(run.chunks)[0].router.observer.stage.close()
    dist.barrier()
    observed = read(folder / "run")
    assert observed.iteration.tolist() == [1, 2, 3, 4]
    _assert_same(read_megatron(folder / "trace", num_experts=8), observed, [1, 2, 3])
    _assert_same(read_megatron(folder / "saved"), observed, [2])
    if rank == 0:  # the commands read them, too
        assert read_loads(folder / "trace", num_experts=8)[:, :, 0].tolist() == observed.load[:3].tolist()
        words = report.write(folder / "saved", folder / "saved.html")
        assert "1 iteration (2 to 2) of 2 MoE layers with 8 experts over 2 ranks" in words[0]
    dist.barrier()


@pytest.mark.fast
def test_unfinished_files_layers_of_mtp_and_groups(tmp_path: Path) -> None:
    """Four ranks are two groups of two; a line that is being written is left out, with its iteration."""
    for rank in range(4):
        lines = [
            f'{{"iter": 5, "block": "decoder", "layer": 3, "tpe": [[1, {rank}], [2, 0]]}}\n',
            '{"iter": 5, "block": "mtp", "mtp_idx": 0, "layer": 0, "tpe": [[0, 7]]}\n',
            '{"iter": 10, "block": "decoder", "layer": 3, "tpe": [[1, 1]]}\n',
            '{"iter": 10, "block": "mtp", "mtp_idx": 0, "la',
        ]
        folder = tmp_path / "tokens_per_expert"
        folder.mkdir(exist_ok=True)
        (folder / f"rank{rank}.jsonl").write_text("".join(lines))
    record = read_megatron(tmp_path, ranks=2)
    assert record.info.layers == ("layer 4", "mtp 1 layer 1") and record.info.ranks == 2
    assert record.iteration.tolist() == [5]
    assert record.load.tolist() == [[[6, 2, 6, 4], [0, 14, 0, 14]]]
    assert np.isnan(record.time).all()
    with pytest.raises(ValueError, match=r"holds no record of a run .*, nor files of Megatron"):
        read_megatron(tmp_path / "other")
    with pytest.raises(ValueError, match="has tokens for expert 3, and num_experts is 2"):
        read_megatron(tmp_path, ranks=2, num_experts=2)
    (tmp_path / "rank0.jsonl").write_text('{"iter": 5}\n')
    with pytest.raises(ValueError, match=r"\.jsonl files that Megatron did not write .KeyError.*layer"):
        read_any(tmp_path)
