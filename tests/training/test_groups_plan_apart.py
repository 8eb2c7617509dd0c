"""Expert-parallel groups that share gradients plan apart: one has replicas, the other none. Oracle: stock Megatron.

A layer's experts lie in several gradient buckets, whose reductions must start in one order on all ranks.
"""

from __future__ import annotations

import pytest
from ranks import ranks

CASES: dict[str, dict] = {
    "plain": dict(),
    "distopt": dict(distributed_optimizer=True),
    "bf16-distopt": dict(distributed_optimizer=True, bf16=True),
    "grouped": dict(grouped=True),
    "grouped-fused-distopt": dict(
        grouped=True, distributed_optimizer=True, settings=(("gradient_accumulation_fusion", True),)
    ),
}
SLOW = {"plain", "distopt", "bf16-distopt", "grouped"}  # whose parts others have too


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES]
)
@ranks(4, preload=lambda name: "te" if CASES[name].get("grouped") else "megatron")
def test_one_group_without_replicas(name: str) -> None:
    if CASES[name].get("grouped"):
        import te_on_cpu

        te_on_cpu.install()
    import planners
    import tiny_gpt
    import torch.distributed as dist

    case = tiny_gpt.Case(overlap=True, accumulate=2, **CASES[name])
    tiny_gpt.initialize(case)
    if case.grouped:
        tiny_gpt.install_fused_wgrad()
    stock = tiny_gpt.train(case, steps=4)
    if dist.get_rank() >= 2:
        planners.replace_planner(planners.no_replicas)
    ours = tiny_gpt.train(case, steps=4, hook=tiny_gpt.fssdp_hook())
    assert (ours.replicas > 0) == (dist.get_rank() < 2)
    buckets = ours.chunks[0].expert_parallel_bucket_groups
    assert len(buckets) > 4
    difference = tiny_gpt.difference(stock, ours)
    assert difference["loss"] <= (tiny_gpt.BF16_TOLERANCE if case.bf16 else 1e-5), difference
