"""Megatron's own `FullCudaGraphWrapper` over the emulator: stock Megatron, 4 experts per rank, HybridEP's static budget.

Oracle: the same model on the same ranks and data, without a graph, bitwise. Other experts are hot in each second step,
so a replay that kept the capture's routes would differ.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flex_backends
import graphs_on_cpu
import pytest
import static_experts
import tiny_gpt
from graph_calls import first_difference
from graph_capture import Graph
from layouts import COMBINED, flex
from quick import quick
from ranks import ranks
from streams_on_cpu import CaptureError

pytestmark = pytest.mark.newest

# microbatches, and settings
CASES = {"2": (2, {}), "4": (4, {}), "2-combined": (2, COMBINED), "4-combined": (4, COMBINED)}
BUDGET = dict(moe_expert_rank_capacity_factor=2.0)


def _stock(accumulate: int, **model: Any) -> Any:
    flex_backends.install()
    static_experts.install()
    settings = flex("hybridep", **model)
    case = tiny_gpt.initialized(accumulate=accumulate, bf16=True, settings=settings)
    stock = tiny_gpt.train(case, steps=4, before_step=tiny_gpt.move_skew_sometimes)
    flex_backends.forget()
    graphs_on_cpu.install()
    graphs_on_cpu.whole_iterations()
    return stock


def _graphed(stock: Any, before_step: Any = None) -> Any:
    settings = graphs_on_cpu.full_iteration(**dict(stock.case.settings))
    case = dataclasses.replace(stock.case, settings=settings)
    return tiny_gpt.train(case, steps=4, before_step=before_step or tiny_gpt.move_skew_sometimes)


@pytest.mark.parametrize("name", quick(CASES, ["2", "4-combined"]))
@ranks(2)
def test_a_budget_of_hybridep(name: str) -> None:
    accumulate, model = CASES[name]
    stock = _stock(accumulate, **BUDGET, **model)
    graphed = _graphed(stock)
    assert tiny_gpt.difference(stock, graphed) == tiny_gpt.SAME
    (graph,) = Graph.made
    assert graph.replays == 3
    # another capture of the same model, on other routes
    tiny_gpt.get_forward_backward_func().reset_cuda_graph("training")
    for step in (4, 5):
        graphed.step(step)
    assert first_difference(graph, Graph.made[1]) is None


@ranks(2)
def test_static_experts() -> None:
    """Oracle: Megatron's own, over what each of them gets alone."""
    flex_backends.install()
    case = tiny_gpt.initialized(settings=flex("hybridep"))
    stock = tiny_gpt.train(case)
    flex_backends.forget()
    static_experts.install()
    static = tiny_gpt.train(dataclasses.replace(case, settings=flex("hybridep", **BUDGET)))
    assert max(tiny_gpt.difference(stock, static).values()) < 1e-5


@ranks(2)
def test_a_dispatch_that_replays_leave_out() -> None:
    """Rows would go where they went in the capture."""

    def leave_out(chunks: list, step: int) -> None:
        tiny_gpt.move_skew_sometimes(chunks, step)
        for graph in Graph.made:
            graph.calls = [call for call in graph.calls if "_place" not in call.name]

    stock = _stock(2, **BUDGET)
    assert tiny_gpt.difference(stock, _graphed(stock, leave_out))["grad"] > 1e-3


@ranks(2)
def test_sizes_that_depend_on_routes() -> None:
    stock = _stock(2)
    with pytest.raises(CaptureError, match=r"aten.nonzero.default has a shape .*flex_backends.py"):
        _graphed(stock)
