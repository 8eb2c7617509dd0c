"""Metrics of an unmodified script in Megatron's own TensorBoard. Here, because Bridge's environment has TensorBoard.

Oracle: the file, read by TensorBoard's own reader; tokens counted by a probe that knows nothing of FSSDP.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_launcher import ROOT, _losses, _pretrain, text  # noqa: F401

from megatron_hecate.tools.run_folder import read


def _board(folder: Path) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("observe", [True, False])
def test_a_script_logs_what_was_routed(
    text: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    observe: bool,
) -> None:
    monkeypatch.setenv("HECATE_PROBE", str(tmp_path / "probe"))
    flags = ["--moe-fssdp-observe"] if observe else ["--moe-fssdp"]
    flags += ["--moe-fssdp-speeds", str(ROOT / "tests" / "free_copies.json")]
    flags += ["--moe-fssdp-record", str(tmp_path / "run")]
    logging = ["--tensorboard-dir", str(tmp_path / "board"), "--tensorboard-log-interval", "1"]
    log = _pretrain(text, *logging, "--moe-per-layer-logging", launcher=["-m", "megatron_hecate", *flags])
    said = "FSSDP observes 4 MoE layers and is off" if observe else "FSSDP on: 4 MoE layers"
    assert log.count(said) == 1
    if observe:
        assert _losses(log) == _losses(_pretrain(text, launcher=[]))
    ranks = [
        [json.loads(line) for line in (tmp_path / "probe" / f"rank{r}.jsonl").read_text().splitlines()] for r in (0, 1)
    ]
    load = np.array([[step["experts"] for step in rank[:6]] for rank in ranks]).sum(axis=0)  # [T, L, E]
    computed = np.array([[step["computed"] for step in rank[:6]] for rank in ranks]).transpose(1, 2, 0)  # [T, L, N]
    record = read(tmp_path / "run")
    assert record.load.tolist() == load.tolist() and record.iteration.tolist() == list(range(1, 7))
    if not observe:
        assert record.rank_load.tolist() == computed.tolist()
    factor, expert = computed.max(axis=2) / computed.mean(axis=2), load.max(axis=2) / load.mean(axis=2)
    over_layers = computed.sum(axis=1)
    routed = load.reshape(6, 4, 2, 8).sum(axis=3).max(axis=2)
    expected = {
        "moe/avg_overload_factor": factor.mean(axis=1),
        "moe/max_overload_factor": factor.max(axis=1),
        "moe/max_cum_overload_factor": over_layers.max(axis=1) / over_layers.mean(axis=1),
        "moe/max_vio": (expert - 1).mean(axis=1),
        "moe/dead_experts": (load == 0).sum(axis=(1, 2)),
        "moe/overload_factor_layer_1": factor[:, 1],
        "fssdp/ms_recovered": (routed - computed.max(axis=2)).sum(axis=1),
        "fssdp/ms_lost_to_imbalance": (computed.max(axis=2) - computed.mean(axis=2)).sum(axis=1),
    }
    if not observe:
        expected["fssdp/replicas"] = (record.replica >= 0).sum(axis=(1, 2, 3))
        assert expected["fssdp/replicas"].any()
    board = _board(tmp_path / "board")
    homes = json.loads((tmp_path / "probe" / "rank0.jsonl").read_text().splitlines()[-1])["home_bytes"]
    token_ms = 3 * 2 * (homes / 4 / 4 / 8) / 1e9 * 1e3  # forward and backward of fp32 weights, at that file's FLOP/s
    for name, values in expected.items():
        scale = token_ms if "ms_" in name else 1
        assert list(board[name].values()) == pytest.approx((values * scale).tolist(), rel=1e-5), name
        assert list(board[name]) == [1, 2, 3, 4, 5, 6], name
