"""FSSDP inside one CUDA graph of whole iterations, over the emulator.

Oracles: FSSDP without a graph on the same ranks and data, with an all-gather of the loads, bitwise; stock Megatron; a
negative control.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from pathlib import Path
from typing import Any

import budgeted
import dense_routes
import flex_backends
import graphs_on_cpu
import numpy as np
import pytest
import static_experts
import tiny_gpt
import torch.distributed as dist
from graph_calls import first_difference
from graph_capture import Graph
from layouts import COMBINED, FUSED_WGRAD, MTP, flex
from quick import quick
from ranks import ranks

import megatron_hecate
from megatron_hecate.comm.agreement import SwitchOnError
from megatron_hecate.nvlink.transport import NVLink
from megatron_hecate.record.run_folder import read
from megatron_hecate.step import layer, layer_state
from megatron_hecate.switch_on import connect

pytestmark = pytest.mark.newest

STEPS = 7
BUDGET = dict(moe_expert_rank_capacity_factor=2.0)


class _Plans:
    """Placements of all layers in each step, and in the step that captured each graph, by number of graphs."""

    def __init__(self) -> None:
        self.distinct: set[tuple] = set()
        self.captured: dict[int, tuple] = {}

    def before_step(self, chunks: list, step: int) -> None:
        tiny_gpt.move_skew_sometimes(chunks, step)
        layers = tiny_gpt.moe_layers(chunks)
        plans = tuple(layer.fssdp.placement.table.tobytes() for layer in layers)
        self.distinct.add(plans)
        self.captured.setdefault(len(Graph.made), plans)


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
    tiny_gpt.install_fused_wgrad()
    # it refuses experts with code of their own, such as these
    layer_state.check_layer = lambda layer: None
    settings = flex("hybridep", **{**BUDGET, **(model or {})})
    return tiny_gpt.initialized(bf16=True, settings=settings, **fields)


def _switch_to_graphs(case: Any) -> Any:
    flex_backends.forget()
    graphs_on_cpu.install()
    graphs_on_cpu.whole_iterations()
    return dataclasses.replace(case, settings=graphs_on_cpu.full_iteration(**dict(case.settings)))


def _all_gathered(case: Any, **hook: Any) -> Any:
    """As `_eager`, with an all-gather of the loads in place of their exchange by kernels."""
    exchange, NVLink.exchange_loads = NVLink.exchange_loads, lambda *_, **__: None
    trained = _eager(case, **hook)
    NVLink.exchange_loads = exchange
    return trained


def _graphed(case: Any, **hook: Any) -> Any:
    return _eager(_switch_to_graphs(case), **hook)


# microbatches, model settings, and further fields of a case, by number of ranks
OVERLAPS = dict(distributed_optimizer=True, overlap=True)
TWO: dict[str, dict[str, Any]] = {
    "2 microbatches": dict(accumulate=2),
    "4 microbatches": dict(accumulate=4),
    "overlaps": dict(accumulate=2, **OVERLAPS),
    "bf16 main gradients, overlaps": dict(
        accumulate=2, grad_reduce_in_fp32=False, model=FUSED_WGRAD, **OVERLAPS
    ),
    "routes as indices": dict(accumulate=2, dense=True),
    "MTP": dict(accumulate=2, model=MTP),
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


def _check(lifetime: str = "iteration", dense: bool = False, **fields: Any) -> None:
    case = _case(**fields)
    if dense:
        dense_routes.install()
    eager = _all_gathered(case, lifetime=lifetime)
    layer.gather_rows = None  # a graph needs no collective for the loads
    plans = _Plans()
    graphed = _graphed(case, lifetime=lifetime, plans=plans)
    assert eager.replicas and tiny_gpt.difference(eager, graphed) == tiny_gpt.SAME
    (graph,) = Graph.made
    assert graph.replays == STEPS - 1, "the second step is captured, and replayed at once"
    assert len(plans.distinct) > 2, "replays ran other plans than the capture"
    kernel = f"fssdp_reduce_{'32_32' if fields.get('grad_reduce_in_fp32', True) else '16_16'}"
    assert any(kernel in call.name for call in graph.calls)


@pytest.mark.parametrize("name", quick(TWO, ["2 microbatches", "lifetime layer"]))
@ranks(2, timeout=600)
def test_two(name: str) -> None:
    _check(**TWO[name])


@pytest.mark.parametrize("name", quick(FOUR, ["EDP 2, overlaps"]))
@ranks(4, timeout=600)
def test_four(name: str) -> None:
    _check(**FOUR[name])


def _evaluated(case: Any) -> tuple[Any, list[float]]:
    """Train eight steps, and evaluate after every second one, whose graph has tables of its own."""
    model = tiny_gpt.train(case, steps=0, hook=tiny_gpt.fssdp_hook(transport="nvlink"))
    losses = []
    for step in range(8):
        tiny_gpt.move_skew_sometimes(model.chunks, step)
        model.step(step)
        if step % 2:
            losses.append(model.evaluate(step))
    model.read_params()
    return model, losses


@ranks(2, timeout=600)
def test_evaluation_between_replays() -> None:
    case = _case(accumulate=2)
    eager, eager_losses = _evaluated(case)
    graphed, losses = _evaluated(_switch_to_graphs(case))
    assert tiny_gpt.difference(eager, graphed) == tiny_gpt.SAME and losses == eager_losses
    assert [graph.replays for graph in Graph.made] == [7, 3], "training, and evaluation"


@ranks(2, timeout=600)
def test_overflow() -> None:
    """A step over the budget is run again without a graph, which is captured anew: with replicas where experts became
    hot, in stock always."""
    case = _case(accumulate=2, model=dict(moe_expert_rank_capacity_factor=1.25))
    settings = dict(steps=9, before_step=tiny_gpt.move_skew_sometimes)
    _, stock_again = budgeted.train(case, **settings)
    flex_backends.forget()
    settings |= dict(hook=tiny_gpt.fssdp_hook(transport="nvlink"))
    eager, eager_again = budgeted.train(case, **settings)
    graphed, graphed_again = budgeted.train(_switch_to_graphs(case), **settings)
    assert eager.replicas and tiny_gpt.difference(eager, graphed) == tiny_gpt.SAME
    assert stock_again == [*range(9)] and eager_again == graphed_again == [0, 2, 4, 6, 8]
    assert len(Graph.made) > 1


@ranks(2, timeout=600)
def test_overflow_in_evaluation() -> None:
    """Megatron zeroes gradients before it evaluates again: that begins no iteration, which would have no tokens."""
    case = _case(accumulate=2, model=dict(moe_expert_rank_capacity_factor=1.5))
    settings = dict(steps=4, evaluations=4, before_step=tiny_gpt.move_skew_sometimes)
    settings |= dict(hook=tiny_gpt.fssdp_hook(transport="nvlink"))
    eager, eager_again = budgeted.train(case, **settings)
    graphed, graphed_again = budgeted.train(_switch_to_graphs(case), **settings)
    assert tiny_gpt.difference(eager, graphed) == tiny_gpt.SAME and Graph.made
    trained = [
        [*again].count(step) - 4 for again in (eager_again, graphed_again) for step in range(4)
    ]
    assert trained == [1, 0, 1, 0] * 2, "evaluations have no replicas, and are all over the budget"


@ranks(2, timeout=600)
def test_no_replicas_is_stock() -> None:
    """Copies do not pay at real speeds of so small a model, and the budget is large. Oracle: stock Megatron, without a
    graph, bitwise."""
    case = _case(accumulate=2, model=dict(moe_expert_rank_capacity_factor=8.0), **OVERLAPS)
    settings = dict(steps=5, before_step=tiny_gpt.move_skew_sometimes)
    stock = tiny_gpt.train(case, **settings)
    hook = tiny_gpt.fssdp_hook(transport="nvlink", speeds=None)
    graphed = tiny_gpt.train(_switch_to_graphs(case), hook=hook, **settings)
    assert not graphed.replicas and tiny_gpt.difference(stock, graphed) == tiny_gpt.SAME
    assert [graph.replays for graph in Graph.made] == [4]


class _Metrics(_Plans):
    """Metrics of the layers after each step, read by rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[list] = []

    def before_step(self, chunks: list, step: int) -> None:
        super().before_step(chunks, step)
        if dist.get_rank() == 0:
            self.read.append(megatron_hecate.layer_metrics(chunks))


@ranks(2, timeout=600)
def test_metrics_of_one_rank() -> None:
    """They start no sum, and find none where the next iteration has begun but has not run."""
    case = _case(accumulate=2)
    expected, metrics = _Metrics(), _Metrics()
    eager = _eager(case, plans=expected)
    graphed = _graphed(case, plans=metrics)
    assert tiny_gpt.difference(eager, graphed) == tiny_gpt.SAME and metrics.read == expected.read
    assert [graph.replays for graph in Graph.made] == [STEPS - 1]
    graphed.zero()
    assert all(layer.routed_tokens > 0 for layer in megatron_hecate.layer_metrics(graphed.chunks))
    graphed.step(STEPS)


@ranks(2, timeout=600)
def test_records() -> None:
    """Loads, replicas and rank loads of every iteration, also of replays, as without a graph."""
    root = Path(os.environ["TEST_FOLDER"])
    case = _case(accumulate=2)
    for name, train in (("eager", _eager), ("graphed", _graphed)):
        (layer, *_) = tiny_gpt.moe_layers(train(case, record=root / name).chunks)
        layer.prefetcher.monitor.collect()
        layer.prefetcher.monitor.recorder.stage.close()
    dist.barrier()
    expected, graphed = vars(read(root / "eager")), vars(read(root / "graphed"))
    for name in ("iteration", "load", "replica", "rank_load", "peak", "factor", "stock_factor"):
        np.testing.assert_array_equal(graphed[name], expected[name], err_msg=name)
    plans = {tables.tobytes() for tables in expected["replica"]}
    assert len(expected["iteration"]) == STEPS and len(plans) > 2
    assert [graph.replays for graph in Graph.made] == [STEPS - 1]


@ranks(2, timeout=600)
def test_captures_under_two_plans_are_equal() -> None:
    """The same launches with the same arguments: no plan is in a graph."""
    plans = _Plans()
    graphed = _eager(_switch_to_graphs(_case(accumulate=2)), plans=plans)
    tiny_gpt.get_forward_backward_func().reset_cuda_graph("training")
    for step in range(STEPS, STEPS + 2):
        plans.before_step(graphed.chunks, step)
        graphed.step(step)
    plans.before_step(graphed.chunks, STEPS)
    first, second = Graph.made
    assert plans.captured[1] != plans.captured[2]
    assert first_difference(first, second) is None
    counts = Counter(call.name.split()[1] for call in first.calls if call.name.startswith("kernel"))
    assert counts["fssdp_gather"] == counts["fssdp_reduce_32_32"] == 2, "one of each per layer"


@ranks(2, timeout=600)
def test_tables_that_are_not_rewritten() -> None:
    """Negative control: replays with the capture's transfers differ."""
    case = _case(accumulate=2)
    eager = _eager(case)
    write, written = NVLink.write, []

    def write_at_first(transport: NVLink, plans: Any) -> None:
        written.append(plans)
        write(transport, plans if len(written) <= 3 else written[2])

    NVLink.write = write_at_first
    assert tiny_gpt.difference(eager, _graphed(case))["grad"] > 1e-3


@pytest.mark.parametrize(
    ("transport", "frozen"),
    [("p2p", "p2p"), ("nvlink", "nvlink between several NVLink domains")],
)
@ranks(2)
def test_messages_are_refused(transport: str, frozen: str) -> None:
    case = _switch_to_graphs(_case(accumulate=2))
    if transport == "nvlink":
        connect.socket.gethostname = lambda: f"node {dist.get_rank()}"
    with pytest.raises(
        SwitchOnError, match=f"freeze peers and sizes of the messages of transport {frozen}; set"
    ):
        tiny_gpt.train(case, steps=0, hook=tiny_gpt.fssdp_hook(transport=transport))


@ranks(2)
def test_what_a_replay_cannot_do_is_refused_in_one_message() -> None:
    case = _switch_to_graphs(_case(dict(moe_expert_rank_capacity_factor=None), accumulate=2))
    hook = tiny_gpt.fssdp_hook(transport="nvlink", late_replicas=2, rehome=1)
    with pytest.raises(SwitchOnError) as error:
        tiny_gpt.train(case, steps=0, hook=hook)
    for setting in ("cuda_graph_impl=", "moe_fssdp_late_replicas=2", "moe_fssdp_rehome=1"):
        assert f"--moe-fssdp with {setting}" in str(error.value)
    assert "budget (moe_expert_rank_capacity_factor) lets no host wait for token counts" in str(
        error.value
    )


@ranks(2, timeout=600)
def test_released_memory() -> None:
    """The graph reads it: an error on all ranks, unless the graph is dropped as well."""
    case = _switch_to_graphs(_case(accumulate=2))
    graphed = _eager(case)
    assert megatron_hecate.release(graphed.chunks)
    with pytest.raises(RuntimeError, match="memory of replicas was released, which Megatron's"):
        graphed.step(STEPS)
    tiny_gpt.get_forward_backward_func().reset_cuda_graph("training")
    for step in range(STEPS, STEPS + 3):
        graphed.step(step)
    assert [graph.replays for graph in Graph.made] == [STEPS - 1, 2]


@ranks(2)
def test_no_slots_are_refused() -> None:
    case = _switch_to_graphs(_case(accumulate=2))
    with pytest.raises(SwitchOnError, match="prepared for plans with slots only; set"):
        tiny_gpt.train(case, steps=0, hook=tiny_gpt.fssdp_hook(transport="nvlink", slots=0))
