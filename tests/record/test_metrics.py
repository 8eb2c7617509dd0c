"""Metrics of a training run, and layers that run stock code because copies would not pay.

Oracle: the unconverted model; literal numbers. `test_job_metrics` counts tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import recorded
import tiny_gpt
from ranks import ranks

from megatron_hecate import layer_metrics
from megatron_hecate.plan import CPU
from megatron_hecate.record.metrics import stage_metrics, step_metrics, summarize
from megatron_hecate.record.run_folder import read


@ranks(2)
def test_where_copies_do_not_pay_the_layer_runs_stock_code() -> None:
    """Usual speeds of CPU ranks: no copy pays on so small a model. Nothing but the counts is communicated."""
    from megatron_hecate.step import layer

    case = tiny_gpt.initialized(accumulate=2)
    stock = tiny_gpt.train(case)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a layer without replicas communicates")

    def watched(chunks: list) -> list:
        layer.gather_rows = forbidden
        return tiny_gpt.before_transfers(chunks, forbidden)

    hook = tiny_gpt.fssdp_hook(speeds=None)
    ours = tiny_gpt.train(case, hook=lambda chunks: watched(hook(chunks)))
    assert tiny_gpt.difference(stock, ours) == tiny_gpt.SAME
    assert (
        tiny_gpt.moe_layers(ours.chunks)[0].fssdp.world.speeds is CPU
    )  # also where a CPU stands in for a GPU
    metrics = layer_metrics(ours.chunks)
    assert len(metrics) == 2 and all(
        m.bypassed and m.replicas == 0 and m.computed == m.routed > 1 for m in metrics
    )


@pytest.mark.fast
def test_what_is_logged_of_two_layers() -> None:
    """Literal numbers: a layer with one hot and one dead expert, and a layer without tokens."""
    load = np.array([[60, 20, 20, 0], [0, 0, 0, 0]])
    routed, computed = np.array([[80, 20], [0, 0]]), np.array([[55, 45], [0, 0]])
    values = step_metrics(load, routed, computed, token_ms=2.0, price_ms=np.array([60.0, 0.0]))
    values["hidden_share"] = np.array([0.5, np.nan])  # no copies there
    found = summarize(["layer 3", "mtp layer 1"], values, per_layer=True)
    assert found == pytest.approx(
        {
            "moe/avg_overload_factor": 1.05,
            "moe/max_overload_factor": 1.1,
            "moe/max_cum_overload_factor": 1.1,
            "moe/max_vio": (60 / 25 - 1) / 2,
            "moe/dead_experts": 5,
            "fssdp/ms_lost_to_imbalance": 10,
            "fssdp/ms_recovered_gross": 50,
            "fssdp/ms_recovered": -10,
            "fssdp/hidden_share": 0.5,
            "moe/overload_factor_layer_2": 1.1,
            "moe/overload_factor_mtp_layer_0": 1,
            "moe/max_vio_layer_2": 1.4,
            "moe/max_vio_mtp_layer_0": 0,
            "moe/dead_experts_layer_2": 1,
            "moe/dead_experts_mtp_layer_0": 4,
            "fssdp/ms_lost_to_imbalance_layer_2": 10,
            "fssdp/ms_lost_to_imbalance_mtp_layer_0": 0,
            "fssdp/ms_recovered_gross_layer_2": 50,
            "fssdp/ms_recovered_gross_mtp_layer_0": 0,
            "fssdp/ms_recovered_layer_2": -10,
            "fssdp/ms_recovered_mtp_layer_0": 0,
            "fssdp/hidden_share_layer_2": 0.5,
        }
    )
    assert "hidden_share" not in " ".join(
        summarize(
            ["layer 3", "mtp layer 1"],
            {**values, "hidden_share": np.full(2, np.nan)},
            per_layer=True,
        )
    )


@pytest.mark.fast
def test_experts_that_a_layer_lacks_are_not_dead() -> None:
    """Layers of four and of two experts on two ranks, in one record. Literal numbers."""
    load = [np.array([6, 0, 1, 1]), np.array([3, 1])]
    rank = np.array([[6, 2], [3, 1]])
    values = step_metrics(load, rank, rank, token_ms=1.0)
    assert values["dead_experts"].tolist() == [1, 0]
    assert values["max_vio"].tolist() == [2.0, 0.5]
    assert values["overload_factor"].tolist() == [1.5, 1.5]


@pytest.mark.fast
def test_budgets_that_sufficed_are_logged(tmp_path: Path) -> None:
    """The largest of all layers. Literal numbers."""
    held = recorded.arrays(recorded.Size())
    held |= {"factor": np.full((6, 3), 1.1), "stock_factor": np.full((6, 3), 1.5)}
    held["factor"][2, 1], held["stock_factor"][2, 2] = 1.25, 1.75
    record = read(recorded.write(tmp_path / "run", recorded.Size(), held=held))
    names = "load replica rank_load late window factor stock_factor".split()
    columns = {name: getattr(record, name)[2] for name in names}
    values = stage_metrics(record.info, [8, 8, 8], columns)
    logged = summarize(record.info.layers, values, per_layer=False)
    assert logged["fssdp/rank_capacity_factor"] == 1.25
    assert logged["fssdp/stock_rank_capacity_factor"] == 1.75
