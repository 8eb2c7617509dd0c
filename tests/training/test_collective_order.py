"""Expert-parallel groups plan apart: one has replicas, the other none. Oracle: stock Megatron.

Collectives that both take part in must be dispatched and awaited in one order, or ranks wait for
each other in a circle (`adapter.parameter_gathers`). Small buckets are the hard case: then each
layer has several buckets of dense parameters and several of experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from layouts import FULL, SHARDED
from quick import quick
from ranks import ranks

# of the gradients: a reduction first waits for the bucket before
ACCUMULATION = (("reduce_scatter_with_fp32_accumulation", True),)


def _slow(value: object) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def _plan_apart(case: Any, groups: Any = ((2, 3), (0, 1)), **settings: Any) -> None:
    """Compare FSSDP with stock: the ranks of each of ``groups`` in turn have no replicas."""
    import planners
    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate.plan import plan_replicas

    stock = tiny_gpt.train(case)
    for without in groups:
        apart = dist.get_rank() in without
        planner = planners.no_replicas if apart else plan_replicas
        planners.replace_planner(planner)
        ours = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(**settings))
        assert (ours.replicas > 0) == (not apart or "late_replicas" in settings)
        difference = tiny_gpt.difference(stock, ours)
        assert difference["loss"] <= 1e-5 and difference["grad"] <= 1e-5, (case, difference)


@pytest.mark.parametrize("size", [_slow(1), 1000, _slow(4000), _slow(10**9)])
@ranks(4)
def test_buckets_of_every_size(size: int) -> None:
    """From one parameter to everything."""
    import tiny_gpt

    case = tiny_gpt.Case(**SHARDED, bucket_size=size)
    tiny_gpt.initialize(case)
    _plan_apart(case)


@pytest.mark.slow
@ranks(4)
def test_gathers_of_recomputed_layers() -> None:
    """Buckets of one parameter each, also in the next tests."""
    import tiny_gpt

    case = tiny_gpt.Case(**SHARDED, bucket_size=1, settings=tuple(FULL.items()))
    tiny_gpt.initialize(case)
    _plan_apart(case, lifetime="layer")


@pytest.mark.slow
@ranks(4)
def test_gathers_that_are_aligned() -> None:
    import tiny_gpt

    case = tiny_gpt.Case(**SHARDED, bucket_size=1, ddp=(("align_param_gather", True),))
    tiny_gpt.initialize(case)
    _plan_apart(case)


@pytest.mark.slow
@ranks(4)
def test_gathers_beside_shared_experts() -> None:
    import tiny_gpt

    shared = (("moe_shared_expert_intermediate_size", 32), ("moe_shared_expert_overlap", True))
    case = tiny_gpt.Case(**SHARDED, bucket_size=1, settings=shared)
    tiny_gpt.initialize(case)
    _plan_apart(case, late_replicas=2)


@pytest.mark.newest
@pytest.mark.parametrize("size", [_slow(1), _slow(1000)])
@ranks(4)
def test_reductions_that_wait_for_the_bucket_before(size: int) -> None:
    """`reduce_scatter_with_fp32_accumulation`, and buckets from one parameter on."""
    import tiny_gpt

    case = tiny_gpt.Case(**SHARDED, ddp=ACCUMULATION, bucket_size=size)
    tiny_gpt.initialize(case)
    _plan_apart(case)


@pytest.mark.newest
@pytest.mark.slow
@ranks(4)
def test_reductions_around_collectives_of_the_attention() -> None:
    """All ranks are one context-parallel group, which contains two expert-parallel groups."""
    import tiny_gpt

    case = tiny_gpt.Case(cp=4, **SHARDED, bucket_size=1000, ddp=ACCUMULATION)
    tiny_gpt.initialize(case)
    _plan_apart(case)


@pytest.mark.newest
@pytest.mark.parametrize("schedule", quick(["all-reduces", "combined", "recomputed"], ["combined"]))
@ranks(4)
def test_reductions_of_other_schedules(schedule: str) -> None:
    """Each with two microbatches."""
    import tiny_gpt

    case = tiny_gpt.Case(overlap=True, bucket_size=1, accumulate=2)
    tiny_gpt.initialize(case)
    sharded = dataclasses.replace(case, distributed_optimizer=True, ddp=ACCUMULATION)
    combined = (("overlap_moe_expert_parallel_comm", True),)
    if schedule == "all-reduces":
        _plan_apart(case)
    elif schedule == "combined":
        _plan_apart(dataclasses.replace(sharded, settings=combined))
    else:
        recompute = tuple(FULL.items())
        _plan_apart(dataclasses.replace(sharded, settings=recompute), lifetime="layer")


@pytest.mark.newest
@pytest.mark.slow
@ranks(4, preload="te")
def test_delayed_weight_gradients() -> None:
    """The layer itself reaches the point where reductions start: autograd's is too early."""
    import te_on_cpu

    te_on_cpu.install()
    import tiny_gpt

    delayed = dict(overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True)
    case = tiny_gpt.Case(
        **SHARDED,
        grouped=True,
        accumulate=2,
        bucket_size=1,
        ddp=ACCUMULATION,
        settings=tuple(delayed.items()),
    )
    tiny_gpt.initialize(case)
    _plan_apart(case)


@pytest.mark.newest
@ranks(4)
def test_layers_without_an_attention_in_front() -> None:
    """Hybrid models, where attention and experts are layers of their own."""
    import tiny_gpt
    import tiny_hybrid

    tiny_hybrid.install("*EE*E", "")
    settings = (("num_layers", 5),)
    case = tiny_gpt.Case(**SHARDED, bucket_size=1, ddp=ACCUMULATION, settings=settings)
    tiny_gpt.initialize(case)
    _plan_apart(case)


@pytest.mark.slow
@ranks(8, timeout=300)
def test_interleaved_pipelines() -> None:
    """Two stages of two chunks; DDP gives later chunks one bucket each."""
    import tiny_gpt

    case = tiny_gpt.Case(pp=2, vpp=2, accumulate=4, **SHARDED, bucket_size=1)
    tiny_gpt.initialize(case)
    for align in (False, True):
        aligned = (("align_param_gather", align),)
        _plan_apart(dataclasses.replace(case, ddp=aligned), groups=((2, 3, 6, 7), (0, 1, 4, 5)))
