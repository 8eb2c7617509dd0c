"""Plans that stand in for those of our planner: replicas on some ranks only, slots that stay empty, late replicas.

Oracle: stock Megatron on the same ranks. `test_layouts` trains layouts with late replicas.
"""

from __future__ import annotations

import itertools
import socket
from typing import Any

import planners
import pytest
import tiny_gpt
import torch.distributed as dist
import variants
from layout_tables import HYBRID
from layouts import BIAS, COMBINED, DELAYED, FULL, FUSED_WGRAD, SHARDED, Layout
from quick import quick
from ranks import ranks

from megatron_hecate.plan import Placement, Speeds, plan_replicas
from megatron_hecate.record.metrics import layer_metrics

# Of the gradients: a reduction first waits for the bucket before
ACCUMULATION = dict(reduce_scatter_with_fp32_accumulation=True)
# buckets of one parameter
TINY = dict(SHARDED, bucket_size=1)
ACCUMULATED = dict(TINY, ddp=ACCUMULATION)
LAYER = dict(lifetime="layer")
OVERLAPPED = dict(moe_shared_expert_intermediate_size=32, moe_shared_expert_overlap=True)
APART = {
    "small buckets": Layout(4, dict(SHARDED, bucket_size=1000), {}),
    "one bucket": Layout(4, dict(SHARDED, bucket_size=10**9), {}),
    "recomputed": Layout(4, TINY, FULL),
    "aligned gathers": Layout(4, dict(TINY, ddp=dict(align_param_gather=True)), {}),
    "shared experts": Layout(4, TINY, OVERLAPPED),
    "bf16": Layout(4, dict(SHARDED, bf16=True, accumulate=2), {}),
    "all-reduces": Layout(4, dict(overlap=True, bucket_size=1, accumulate=2), {}),
    "grouped, fused": Layout(4, dict(TINY, accumulate=2), FUSED_WGRAD, experts="grouped"),
    "accumulated": Layout(4, ACCUMULATED, {}),
    "accumulated, small buckets": Layout(4, dict(ACCUMULATED, bucket_size=1000), {}),
    "accumulated, recomputed": Layout(4, dict(ACCUMULATED, accumulate=2), FULL),
    "accumulated, combined": Layout(4, dict(ACCUMULATED, accumulate=2), COMBINED),
    # the layer itself reaches the point where reductions start: autograd's is too early
    "accumulated, delayed": Layout(4, dict(ACCUMULATED, accumulate=2), DELAYED, experts="grouped"),
    # all ranks are one context-parallel group, which contains two expert-parallel groups
    "accumulated, around the attention": Layout(4, dict(ACCUMULATED, cp=4, bucket_size=1000), {}),
    "accumulated, no attention in front": Layout(
        4, ACCUMULATED, dict(num_layers=5), pattern=(HYBRID[0], "")
    ),
    # two stages of two chunks; DDP gives later chunks one bucket each
    "pipelines": Layout(8, dict(TINY, pp=2, vpp=2, accumulate=4), {}),
    "pipelines, aligned gathers": Layout(
        8, dict(TINY, pp=2, vpp=2, accumulate=4, ddp=dict(align_param_gather=True)), {}
    ),
}
# settings of FSSDP
SETTINGS = dict.fromkeys(("recomputed", "accumulated, recomputed"), LAYER)
SETTINGS["shared experts"] = dict(late_replicas=2)
QUICK_APART = ("grouped, fused", "accumulated, combined")


@pytest.mark.newest
@pytest.mark.parametrize("name", quick(APART, QUICK_APART))
@ranks(lambda name: APART[name].num_ranks, timeout=300, preload=lambda name: APART[name].packages)
def test_ranks_without_replicas(name: str) -> None:
    """Expert-parallel groups plan apart: the ranks of each of two in turn have no replicas.

    Collectives that both take part in must be dispatched and awaited in one order, or ranks wait for each other in a
    circle (`adapter.parameter_gathers`). Small buckets are the hard case: then each layer has several buckets of dense
    parameters and several of experts.
    """
    layout, settings = APART[name], SETTINGS.get(name, {})
    groups = ((2, 3), (0, 1)) if layout.num_ranks == 4 else ((2, 3, 6, 7), (0, 1, 4, 5))
    case, _ = variants.case_of(layout)
    stock = tiny_gpt.train(case)
    tolerance = tiny_gpt.BF16_TOLERANCE if case.bf16 else 1e-5
    for idle_ranks in groups:
        is_idle = dist.get_rank() in idle_ranks
        planners.replace_planner(planners.no_replicas if is_idle else plan_replicas)
        ours = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(**settings))
        assert (ours.replicas > 0) == (not is_idle or "late_replicas" in settings)
        buckets = ours.chunks[0].expert_parallel_bucket_groups
        assert len(buckets) > 1 or case.bucket_size > 1 or dist.get_rank() > 3, "no later stage"
        difference = tiny_gpt.difference(stock, ours)
        assert difference["loss"] <= tolerance and difference["grad"] <= tolerance, difference


# For each iteration in turn, the slots of rank 0 and of rank 1 that hold a replica.
FILLED = (((1,), ()), ((0, 1, 2), (0,)), ((), (2,)), ((0, 2), (0, 1)), ((), ()), ((2,), (1, 2)))
SLOTS = 3
TWICE = dict(accumulate=2)
# layouts, and lifetimes
WITH_GAPS = {
    "sequential": (Layout(2, TWICE, {}), "layer"),
    "grouped-delayed": (
        Layout(2, TWICE, dict(DELAYED, **FUSED_WGRAD), experts="grouped"),
        "iteration",
    ),
    "grouped-biases": (Layout(2, TWICE, BIAS, experts="grouped"), "layer"),
    # TransformerEngine keeps state for each GEMM, so all slots are computed
    "quantized": (Layout(2, TWICE, {}, experts="mxfp8"), "iteration"),
}


@pytest.mark.parametrize("name", quick(WITH_GAPS, ["sequential", "grouped-delayed"]))
@ranks(2, preload=lambda name: WITH_GAPS[name][0].packages)
def test_slots_without_replicas(name: str) -> None:
    """At the end of a rank's slots, where they cost nothing, since no GEMM is computed for them, and between others."""
    layout, lifetime = WITH_GAPS[name]
    case, _ = variants.case_of(layout)
    steps = len(FILLED) + 1
    stock = tiny_gpt.train(case, steps=steps)
    turns = itertools.count()
    planners.replace_planner(lambda _, homes, *args, **kwargs: _plan(next(turns), homes, case))
    computed: list[tuple[int, int]] = []
    hook = tiny_gpt.fssdp_hook(slots=SLOTS, lifetime=lifetime)
    ours = tiny_gpt.train(case, steps=steps, hook=lambda chunks: _watch(hook(chunks), computed))
    tiny_gpt.assert_trained_alike(stock, ours)
    last = [max(slots[dist.get_rank()], default=-1) for slots in FILLED]
    homes = case.experts // dist.get_world_size()
    wanted = {homes + (SLOTS if name == "quantized" else slot + 1) for slot in last}
    # with the plan of an iteration without any replica, Megatron's module computes
    assert {count for count, _ in computed} == wanted, (computed, wanted)
    assert any(tokens > 0 for _, tokens in computed), "no tokens were routed to this rank"


def _plan(turn: int, homes: Any, case: Any) -> Any:
    """Fill the slots of `FILLED` with the other rank's experts."""

    table = homes.table.copy()
    first = case.experts // 2
    for rank, slots in enumerate(FILLED[turn // case.layers % len(FILLED)]):
        for slot in slots:
            table[rank, first + slot] = first * (1 - rank) + slot
    return Placement(homes.home, table)


def _watch(chunks: list, computed: list[tuple[int, int]]) -> list:
    """Have the number of physical experts, and of their tokens, appended to ``computed`` in each forward of a twin."""
    for layer in tiny_gpt.moe_layers(chunks):
        twin = layer.experts.physical.twin.module

        def forward(
            hidden: Any, counts: Any, probs: Any, forward: Any = twin.forward
        ) -> tuple[Any, Any]:
            computed.append((len(counts), int(sum(counts))))
            return forward(hidden, counts, probs)

        twin.forward = forward
    return chunks


@ranks(4)
def test_late_replicas_come_from_other_machines_where_speeds_are_measured() -> None:
    """Every rank is a machine of its own, and copies cost nothing, whether that was measured or not."""
    from megatron_hecate.switch_on import convert

    socket.gethostname = lambda: f"machine {dist.get_rank()}"
    convert.CPU = Speeds.load(tiny_gpt.FREE)
    case = tiny_gpt.initialized(ep=4, accumulate=2)
    stock = tiny_gpt.train(case)
    planners.replace_planner(planners.coldest_experts)
    for speeds in (tiny_gpt.FREE, None):
        ours = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(late_replicas=4, speeds=speeds))
        tiny_gpt.assert_trained_alike(stock, ours)
        metrics = layer_metrics(ours.chunks)
        assert all(m.late <= 4 and m.computed <= m.routed for m in metrics), metrics
        assert (sum(m.late for m in metrics) > 0) == (speeds is not None)
