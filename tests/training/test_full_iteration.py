"""FSSDP inside one CUDA graph of whole iterations, over the emulator.

Oracles: FSSDP without a graph on the same ranks and data, bitwise; stock Megatron; a negative control.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flex_backends
import graphs_on_cpu
import pytest
import static_experts
import tiny_gpt
from graph_capture import Graph
from layouts import COMBINED, flex
from quick import quick
from ranks import ranks

from megatron_hecate.step import layer_state

pytestmark = pytest.mark.newest

STEPS = 7
BUDGET = dict(moe_expert_rank_capacity_factor=2.0)


class _Plans:
    """Placements of all layers in each step."""

    def __init__(self) -> None:
        self.distinct: set[tuple] = set()

    def before_step(self, chunks: list, step: int) -> None:
        tiny_gpt.move_skew_sometimes(chunks, step)
        layers = tiny_gpt.moe_layers(chunks)
        self.distinct.add(tuple(layer.fssdp.placement.table.tobytes() for layer in layers))


def _eager(case: Any, *, plans: _Plans | None = None, **hook: Any) -> Any:
    return tiny_gpt.train(
        case,
        steps=STEPS,
        hook=tiny_gpt.fssdp_hook(transport="nvlink", **hook),
        before_step=(plans or _Plans()).before_step,
    )


def _case(model: dict | None = None, **fields: Any) -> Any:
    flex_backends.install()
    static_experts.install()
    # it refuses experts with code of their own, such as these
    layer_state.check_layer = lambda layer: None
    settings = flex("hybridep", **BUDGET, **(model or {}))
    return tiny_gpt.initialized(bf16=True, settings=settings, **fields)


def _graphed(case: Any, **hook: Any) -> Any:
    flex_backends.forget()
    graphs_on_cpu.install()
    graphs_on_cpu.whole_iterations()
    settings = graphs_on_cpu.full_iteration(**dict(case.settings))
    return _eager(dataclasses.replace(case, settings=settings), **hook)


# microbatches, model settings, and further fields of a case, by number of ranks
OVERLAPS = dict(distributed_optimizer=True, overlap=True)
TWO: dict[str, dict[str, Any]] = {
    "2 microbatches": dict(accumulate=2),
    "4 microbatches": dict(accumulate=4),
    "overlaps": dict(accumulate=2, **OVERLAPS),
    "combined schedule": dict(accumulate=4, model=COMBINED),
    "combined schedule, overlaps": dict(accumulate=4, model=COMBINED, **OVERLAPS),
    "lifetime layer": dict(accumulate=2, model=dict(num_layers=4), lifetime="layer"),
}
FOUR: dict[str, dict[str, Any]] = {
    "EP 4": dict(accumulate=2, ep=4),
    "EDP 2, overlaps": dict(accumulate=2, **OVERLAPS),
    "PP 2": dict(accumulate=4, pp=2, model=dict(batch_p2p_sync=False)),
    "PP 2, VPP 2, overlaps": dict(accumulate=4, pp=2, vpp=2, **OVERLAPS),
}


def _check(accumulate: int, lifetime: str = "iteration", **fields: Any) -> None:
    case = _case(accumulate=accumulate, **fields)
    eager = _eager(case, lifetime=lifetime)
    plans = _Plans()
    graphed = _graphed(case, lifetime=lifetime, plans=plans)
    assert eager.replicas and tiny_gpt.difference(eager, graphed) == tiny_gpt.SAME
    (graph,) = Graph.made
    assert graph.replays == STEPS - 1, "the second step is captured, and replayed at once"
    assert len(plans.distinct) > 2, "replays ran other plans than the capture"


@pytest.mark.parametrize("name", quick(TWO, ["2 microbatches", "lifetime layer"]))
@ranks(2, timeout=600)
def test_two(name: str) -> None:
    _check(**TWO[name])


@pytest.mark.parametrize("name", quick(FOUR, ["EDP 2, overlaps"]))
@ranks(4, timeout=600)
def test_four(name: str) -> None:
    _check(**FOUR[name])
