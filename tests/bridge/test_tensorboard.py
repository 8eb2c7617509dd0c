"""Metrics of an unmodified script in Megatron's own TensorBoard. Here, because Bridge's environment has TensorBoard.

Oracle: the file, read by TensorBoard's own reader; tokens counted by a probe that knows nothing of FSSDP.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pretraining import ROOT, losses, pretrain
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_hecate.record.prices import PricedRecord
from megatron_hecate.record.run_folder import read


def _board(folder: Path) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


PIPELINE = "--pipeline-model-parallel-size 2"
LAYOUTS = {  # the script's settings, and layers with experts
    "observe": (f"{PIPELINE} --expert-model-parallel-size 1 --moe-layer-freq [0,1,0,0]", [2]),
    "fssdp": ("", [1, 2, 3, 4]),
}


def _steps(file: Path) -> list[tuple[list, list]]:
    """[T] of a rank: [L][E] tokens of its own by expert, [L] that it computed."""
    lines = [json.loads(line) for line in file.read_text().splitlines()][:6]
    return [([e or [0] * 16 for e in line["experts"]], line["computed"]) for line in lines]


@pytest.mark.newest
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_script_logs_what_was_routed(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:
    """On all stages; one of them may have no layer with experts, also the last one, whose last rank logs."""
    observe, (settings, numbers) = layout == "observe", LAYOUTS[layout]
    stages, width = 1 + (PIPELINE in settings), 1 if observe else 2
    run: dict[str, Any] = dict(settings=settings, ranks=width * stages)
    monkeypatch.setenv("HECATE_PROBE", str(tmp_path / "probe"))
    flags = ["--moe-fssdp-observe"] if observe else ["--moe-fssdp"]
    flags += ["--moe-fssdp-speeds", str(ROOT / "tests" / "data" / "free_copies.json")]
    flags += ["--moe-fssdp-record", str(tmp_path / "run")]
    logging = ["--tensorboard-dir", str(tmp_path / "board"), "--tensorboard-log-interval", "1"]
    log = pretrain(
        text, *logging, "--moe-per-layer-logging", launcher=["-m", "megatron_hecate", *flags], **run
    )
    said = (
        f"FSSDP observes {len(numbers)} MoE layers and is off"
        if observe
        else f"FSSDP on: {len(numbers)} MoE layers"
    )
    assert log.count(said) == 1
    if observe:
        assert losses(log) == losses(pretrain(text, launcher=[], **run))
    of_stages = []  # [T, L, E] and [T, L, N] of the layers of each stage that has some
    for stage in range(stages):
        files = (f"rank{width * stage + r}.jsonl" for r in range(width))
        ranks = [_steps(tmp_path / "probe" / name) for name in files]
        if len(ranks[0][0][0]):
            load = np.array([[experts for experts, _ in rank] for rank in ranks]).sum(axis=0)
            of_stages.append(
                (load, np.array([[c for _, c in rank] for rank in ranks]).transpose(1, 2, 0))
            )
    load, computed = (np.concatenate(of, axis=1) for of in zip(*of_stages, strict=True))
    record = read(tmp_path / "run")
    assert record.load.tolist() == load.tolist() and record.iteration.tolist() == list(range(1, 7))
    if not observe:
        assert record.rank_load.tolist() == computed.tolist()
    factor, expert = (
        computed.max(axis=2) / computed.mean(axis=2),
        load.max(axis=2) / load.mean(axis=2),
    )
    cumulative = np.array(
        [of.sum(axis=1).max(axis=1) / of.sum(axis=1).mean(axis=1) for _, of in of_stages]
    )
    routed = load.reshape(6, len(numbers), width, -1).sum(axis=3).max(axis=2)
    expected = {
        "moe/avg_overload_factor": factor.mean(axis=1),
        "moe/max_overload_factor": factor.max(axis=1),
        "moe/max_cum_overload_factor": cumulative.max(axis=0),
        "moe/max_vio": (expert - 1).mean(axis=1),
        "moe/dead_experts": (load == 0).sum(axis=(1, 2)),
        **{
            f"moe/overload_factor_layer_{number - 1}": factor[:, i]
            for i, number in enumerate(numbers)
        },
        "fssdp/ms_recovered_gross": (routed - computed.max(axis=2)).sum(axis=1),
        "fssdp/ms_lost_to_imbalance": (computed.max(axis=2) - computed.mean(axis=2)).sum(axis=1),
    }
    if not observe:
        expected["fssdp/replicas"] = (record.replica >= 0).sum(axis=(1, 2, 3))
        assert expected["fssdp/replicas"].any()
    board = _board(tmp_path / "board")
    assert {tag for tag in board if tag.startswith("moe/overload_factor_layer_")} <= set(expected)
    token_ms = (
        3 * 2 * (3 * 32 * 64) / 1e9 * 1e3
    )  # forward and backward of an expert's weights, at that file's FLOP/s
    for name, values in expected.items():
        scale = token_ms if "ms_" in name else 1
        assert list(board[name].values()) == pytest.approx((values * scale).tolist(), rel=1e-5), (
            name
        )
        assert list(board[name]) == [1, 2, 3, 4, 5, 6], name
    # relief of the fullest rank, less the price of replicas
    relief = token_ms * (routed - computed.max(axis=2))
    won = (relief - PricedRecord(record).price_ms).sum(axis=1)
    assert list(board["fssdp/ms_recovered"].values()) == pytest.approx(won.tolist(), rel=1e-5)
