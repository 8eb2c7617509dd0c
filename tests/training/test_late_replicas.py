"""Late replicas, in training. Oracle: stock Megatron on the same ranks.

Plans before the gate are replaced by ones that are wrong on purpose, so that there is something to do after it. Were a
late replica's weights, its gradient or a token lost, or a plan of the forward not that of the backward, losses or
gradients would differ.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from planners import coldest_experts, no_replicas, replace_planner
from quick import quick
from ranks import ranks

RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SHARDED = dict(accumulate=4, distributed_optimizer=True, overlap=True)
CASES: dict[str, tuple[dict, dict]] = {
    "plain": ({}, {}),
    "accumulate4-distopt-overlap": (SHARDED, {}),
    "recompute": (dict(accumulate=2), RECOMPUTE),
    "one-expert": (dict(one_expert=True, accumulate=2), {}),
    "ep-comm-overlap": (dict(accumulate=4), dict(overlap_moe_expert_parallel_comm=True)),
    "pipeline": (dict(pp=2, vpp=2, **SHARDED), {}),
    "machines": (dict(ep=4, accumulate=2), {}),
}

# What happens to plans after the gate: replicas are added where there is none, or replace the wrong ones.
CHANGES: dict[str, tuple[str, Callable, int]] = {
    f"{name}-{what}": (name, planner, late)
    for name in list(CASES)[:5]
    for what, planner, late in (("added", no_replicas, 2), ("replaced", coldest_experts, 4))
}
QUICK = (
    "plain-added",
    "accumulate4-distopt-overlap-replaced",
    "ep-comm-overlap-added",
)


def _train(name: str, *, planner: Callable, late: int, **settings: Any) -> int:
    """Train a case with and without FSSDP; returns the late replicas of the last step."""
    import tiny_gpt

    from megatron_hecate.record.metrics import layer_metrics

    fields, megatron_settings = CASES[name]
    case = tiny_gpt.Case(**fields, settings=tuple(megatron_settings.items()))
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case)
    replace_planner(planner)
    ours = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(late_replicas=late, **settings))
    tiny_gpt.assert_trained_alike(stock, ours, name)
    metrics = layer_metrics(ours.chunks)
    assert all(m.late <= late and m.computed <= m.routed for m in metrics), metrics
    return sum(m.late for m in metrics)


@pytest.mark.parametrize("change", quick(CHANGES, QUICK))
@ranks(2)
def test_late_replicas_are_added_and_replaced(change: str) -> None:
    name, planner, late = CHANGES[change]
    assert _train(name, planner=planner, late=late) > 0, "no late replica, so nothing was tested"


@pytest.mark.slow
@ranks(4)
def test_late_replicas_in_a_pipeline_of_four_ranks() -> None:
    assert _train("pipeline", planner=coldest_experts, late=3) > 0


@pytest.mark.parametrize(
    "measured", [pytest.param(False, marks=pytest.mark.slow), True], ids=["assumed", "measured"]
)
@ranks(4)
def test_late_replicas_come_from_other_machines_where_speeds_are_measured(measured: bool) -> None:
    """Every rank is a machine of its own, and copies cost nothing, whether that was measured or not."""
    import tiny_gpt

    from megatron_hecate.plan import Speeds
    from megatron_hecate.switch_on import convert

    socket.gethostname = lambda: f"machine {dist.get_rank()}"
    convert.CPU = Speeds.load(tiny_gpt.FREE)
    late = _train(
        "machines", planner=coldest_experts, late=4, speeds=tiny_gpt.FREE if measured else None
    )
    assert (late > 0) == measured


@ranks(2)
def test_development_mode_checks_every_plan() -> None:
    """``python -X dev``: ranks that plan differently are told apart in the first plan, not by a hang in the fetch."""
    from types import SimpleNamespace

    import tiny_gpt

    from megatron_hecate.step import layer_state

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    layer_state.sys = SimpleNamespace(flags=SimpleNamespace(dev_mode=True))
    run = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook())
    assert run.replicas > 0  # valid plans pass
    if dist.get_rank() == 1:
        replace_planner(no_replicas)
    with pytest.raises(
        AssertionError, match=r"layer 1: ranks of \[0, 1\] planned differently: \[-?\d+, -?\d+\]"
    ):
        run.step(3)
