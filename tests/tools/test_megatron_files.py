"""Loads from Megatron's own files. Oracle: what an observer counted in the same run; Megatron's own code writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from ranks import ranks

from megatron_hecate.record.run_folder import RunRecord
from megatron_hecate.tools import report, what_if
from megatron_hecate.tools.megatron_files import read_any, read_megatron


def _assert_same(found: RunRecord, observed: RunRecord, iterations: list[int]) -> None:
    assert found.iteration.tolist() == iterations
    rows = [observed.iteration.tolist().index(iteration) for iteration in iterations]
    assert found.load.tolist() == observed.load[rows].tolist()
    assert found.info.layers == observed.info.layers
    assert (
        found.info.num_experts == observed.info.num_experts
        and found.info.ranks == observed.info.ranks
    )


@pytest.mark.newest
@ranks(2, preload="te")
def test_files_of_a_run_hold_what_an_observer_counted() -> None:
    """A trace of the first three iterations, and tokens per expert of the second."""
    import te_on_cpu

    te_on_cpu.install()
    import tiny_gpt
    import torch.distributed as dist
    from megatron.core.transformer.moe import router_trace
    from megatron.training.activation_logging import ActivationLogger

    from megatron_hecate import HecateConfig, fssdp
    from megatron_hecate.record.run_folder import read
    from megatron_hecate.tools.recorded_loads import read_loads

    folder, rank = Path(os.environ["TEST_FOLDER"]), dist.get_rank()
    case = tiny_gpt.Case(accumulate=2, grouped=True)
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(
        case, steps=0, hook=fssdp(HecateConfig(observe=True, record=f"{folder}/run"))
    )
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
        assert (
            read_loads(folder / "trace", num_experts=8)[:, :, 0].tolist()
            == observed.load[:3].tolist()
        )
        words = report.write(folder / "saved", folder / "saved.html")
        assert "1 iteration (2 to 2) of 2 MoE layers with 8 experts over 2 ranks" in " ".join(words)
    dist.barrier()


def _write(
    folder: Path, layers: list[int], *, per_stage: int, skew: float, trace: bool
) -> np.ndarray:
    """Files as Megatron's of a pipeline with so many ``layers`` per stage, each of ``per_stage`` ranks, with 8 experts;
    of tokens per expert, in expert-parallel groups of two. Returns [T, L, E] what they hold."""
    rng, size, tokens = np.random.default_rng(0), 2 if not trace else 1, 200
    total = np.zeros((3, sum(layers), 8), dtype=int)
    folder.mkdir()
    for stage, num in enumerate(layers):
        shares = np.exp(skew * rng.normal(size=(num, 8)))
        for group in range(per_stage // size):
            lines: list[list[dict]] = [[] for _ in range(size)]
            for step, layer in np.ndindex(3, num):
                chosen = rng.choice(
                    8, (2, size * tokens), p=shares[layer] / shares[layer].sum()
                )  # of 2 microbatches
                counts = np.array([np.bincount(of, minlength=8) for of in chosen])
                total[step, sum(layers[:stage]) + layer] += counts.sum(axis=0)
                at = {"block": "decoder", "layer": layer}
                if trace:
                    lines[0] += [
                        {"step": step, **at, "topk": 1, "top_indices": of[:, None].tolist()}
                        for of in chosen
                    ]
                else:
                    for rank, of in enumerate(np.split(counts, 2, axis=1)):
                        lines[rank].append({"iter": step + 1, **at, "tpe": of.tolist()})
            for rank, of_rank in enumerate(lines):
                name = (
                    f"{'router_trace_' * trace}rank{stage * per_stage + group * size + rank}.jsonl"
                )
                (folder / name).write_text("".join(json.dumps(line) + "\n" for line in of_rank))
    return total


@pytest.mark.fast
@pytest.mark.parametrize("trace", [True, False], ids=["trace", "tokens per expert"])
@pytest.mark.parametrize("skew", [2.0, 0.0])
@pytest.mark.parametrize("layers", [[2, 2], [3, 2], [2]], ids=["even", "uneven", "one stage"])
def test_pipeline_stages_are_noticed_and_joined(
    tmp_path: Path, layers: list[int], skew: float, trace: bool
) -> None:
    """Oracle: the tokens as they were made up. 12 ranks per stage, so that names do not sort as numbers do."""
    written = _write(tmp_path / "run", layers, per_stage=12, skew=skew, trace=trace)
    found = read_megatron(tmp_path / "run", ranks=2 if trace else None, stages=len(layers))
    assert found.load.tolist() == written.tolist()
    assert found.info.layers == tuple(f"layer {n + 1}" for n in range(sum(layers)))
    assert found.info.ranks == 2 and found.iteration.tolist() == [1, 2, 3]
    if len(layers) == 1 or (
        skew == 0 and layers == [2, 2]
    ):  # routers without preference look all the same
        assert read_any(tmp_path / "run").load.sum() == written.sum()
        return
    why = (
        r"rank12\.jsonl has 2 layers, \S*rank0\.jsonl has 3"
        if layers[0] == 3
        else "in 2 blocks of files .*correlation"
    )
    (tmp_path / "run" / f"{'router_trace_' * trace}rank24.jsonl").touch()  # a rank without experts
    with pytest.raises(ValueError, match=f"{why}.*--stages, or stages="):
        read_any(tmp_path / "run")
    assert report.main([str(tmp_path / "run"), "--stages", "2"]) == 0
    simulated = ["--stages", "2", "--model", "olmoe,experts=8,top_k=1"]
    simulated += ["--cluster", "h100x8", "--ranks", "2", "--slots", "0"]
    assert what_if.main([str(tmp_path / "run"), *simulated]) == 0
    for stages in (0, 5):
        with pytest.raises(
            ValueError, match=f"holds files of 24 ranks, not of stages={stages} with groups of"
        ):
            read_megatron(tmp_path / "run", stages=stages)


@pytest.mark.fast
def test_forced_balance_says_nothing_of_groups(tmp_path: Path) -> None:
    """Every expert of four ranks gets as many tokens."""
    for rank in range(4):
        (tmp_path / f"rank{rank}.jsonl").write_text(
            '{"iter": 1, "layer": 0, "tpe": [[5, 5], [5, 5]]}\n'
        )
    found = read_megatron(tmp_path)
    assert found.info.ranks == 4 and found.load.tolist() == [[[10] * 8]]


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
    with pytest.raises(
        ValueError, match=r"rank0\.jsonl, line 1, was not written by Megatron .KeyError.*layer"
    ):
        read_any(tmp_path)


@pytest.mark.fast
def test_a_run_that_goes_back_to_a_checkpoint_counts_an_iteration_once(tmp_path: Path) -> None:
    """Megatron appends what it trains again to the same file; the later line counts, as in our own record."""
    lines = [
        f'{{"iter": {i}, "layer": 0, "tpe": [[{n}, 1], [2, 3]]}}\n'
        for i, n in ((10, 5), (20, 6), (20, 8))
    ]
    (tmp_path / "rank0.jsonl").write_text("".join(lines))
    record = read_megatron(tmp_path)
    assert record.iteration.tolist() == [10, 20]
    assert record.load.tolist() == [[[7, 4]], [[10, 4]]]


@pytest.mark.fast
@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 0, "layer": 0, "topk": 1, "to{"step": 1}',  # a process was killed, and another one went on
        b'{"step": 0, "layer": 0, "topk": 1, "top_indices": [[0], [-1]]}',
        b'{"step": 0, "layer": 0, "topk": 1, "top_indices": [[0], [1, 2]]}',
        b'{"step": 0, "layer": 0}',
        b"[1, 2]",
        b"\xff",
    ],
)
def test_a_line_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, line: bytes
) -> None:
    """Oracle: where it stands."""
    whole = b'{"step": 0, "layer": 0, "topk": 1, "top_indices": [[0], [1]]}'
    (tmp_path / "router_trace_rank0.jsonl").write_bytes(b"\n".join([whole, line, b""]))
    assert report.main([str(tmp_path)]) == 2
    assert "no report: " in (said := capsys.readouterr().err)
    assert f"{tmp_path}/router_trace_rank0.jsonl, line 2, was not written by Megatron" in said
