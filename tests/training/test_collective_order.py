"""Expert-parallel groups plan apart: one has replicas, the other none. Oracle: stock Megatron.

Collectives that both take part in must be dispatched and awaited in one order, or ranks wait for
each other in a circle (`adapter.parameter_gathers`). Small buckets are the hard case: then each
layer has several buckets of dense parameters and several of experts.
"""

from __future__ import annotations

from typing import Any

import planners
import pytest
import tiny_gpt
import torch.distributed as dist
import variants
from layout_tables import HYBRID
from layouts import COMBINED, DELAYED, FULL, FUSED_WGRAD, SHARDED, Layout
from quick import quick
from ranks import ranks

from megatron_hecate.plan import plan_replicas

# of the gradients: a reduction first waits for the bucket before
ACCUMULATION = dict(reduce_scatter_with_fp32_accumulation=True)
# buckets of one parameter
TINY = dict(SHARDED, bucket_size=1)
ACCUMULATED = dict(TINY, ddp=ACCUMULATION)
LAYER = dict(lifetime="layer")
OVERLAPPED = dict(moe_shared_expert_intermediate_size=32, moe_shared_expert_overlap=True)
# layouts, and settings of FSSDP
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "small buckets": (Layout(4, dict(SHARDED, bucket_size=1000), {}), {}),
    "one bucket": (Layout(4, dict(SHARDED, bucket_size=10**9), {}), {}),
    "recomputed": (Layout(4, TINY, FULL), LAYER),
    "aligned gathers": (Layout(4, dict(TINY, ddp=dict(align_param_gather=True)), {}), {}),
    "shared experts": (Layout(4, TINY, OVERLAPPED), dict(late_replicas=2)),
    "bf16": (Layout(4, dict(SHARDED, bf16=True, accumulate=2), {}), {}),
    "all-reduces": (Layout(4, dict(overlap=True, bucket_size=1, accumulate=2), {}), {}),
    "grouped, fused": (
        Layout(4, dict(TINY, accumulate=2), FUSED_WGRAD, experts="grouped"),
        {},
    ),
    "accumulated": (Layout(4, ACCUMULATED, {}), {}),
    "accumulated, small buckets": (Layout(4, dict(ACCUMULATED, bucket_size=1000), {}), {}),
    "accumulated, recomputed": (Layout(4, dict(ACCUMULATED, accumulate=2), FULL), LAYER),
    "accumulated, combined": (Layout(4, dict(ACCUMULATED, accumulate=2), COMBINED), {}),
    # the layer itself reaches the point where reductions start: autograd's is too early
    "accumulated, delayed": (
        Layout(4, dict(ACCUMULATED, accumulate=2), DELAYED, experts="grouped"),
        {},
    ),
    # all ranks are one context-parallel group, which contains two expert-parallel groups
    "accumulated, around the attention": (
        Layout(4, dict(ACCUMULATED, cp=4, bucket_size=1000), {}),
        {},
    ),
    "accumulated, no attention in front": (
        Layout(4, ACCUMULATED, dict(num_layers=5), pattern=(HYBRID[0], "")),
        {},
    ),
    # two stages of two chunks; DDP gives later chunks one bucket each
    "pipelines": (Layout(8, dict(TINY, pp=2, vpp=2, accumulate=4), {}), {}),
    "pipelines, aligned gathers": (
        Layout(8, dict(TINY, pp=2, vpp=2, accumulate=4, ddp=dict(align_param_gather=True)), {}),
        {},
    ),
}
QUICK = ("grouped, fused", "accumulated, combined")


@pytest.mark.newest
@pytest.mark.parametrize("name", quick(CASES, QUICK))
@ranks(
    lambda name: CASES[name][0].num_ranks,
    timeout=300,
    preload=lambda name: CASES[name][0].packages,
)
def test_ranks_without_replicas(name: str) -> None:
    """Compare FSSDP with stock: the ranks of each of two groups in turn have no replicas."""
    layout, settings = CASES[name]
    groups = ((2, 3), (0, 1)) if layout.num_ranks == 4 else ((2, 3, 6, 7), (0, 1, 4, 5))
    case, _ = variants.case_of(layout)
    stock = tiny_gpt.train(case)
    tolerance = tiny_gpt.BF16_TOLERANCE if case.bf16 else 1e-5
    for idle_ranks in groups:
        is_idle = dist.get_rank() in idle_ranks
        planners.replace_planner(planners.no_replicas if is_idle else plan_replicas)
        ours = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(**settings))
        assert (ours.replicas > 0) == (not is_idle or "late_replicas" in settings)
        assert case.bucket_size > 1 or len(ours.chunks[0].expert_parallel_bucket_groups) > 1
        difference = tiny_gpt.difference(stock, ours)
        assert difference["loss"] <= tolerance and difference["grad"] <= tolerance, difference
