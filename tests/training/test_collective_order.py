"""Expert-parallel groups plan apart: one has replicas, the other none. Oracle: stock Megatron.

Collectives that both take part in must be dispatched and awaited in one order, or ranks wait for
each other in a circle (`adapter.parameter_gathers`). Small buckets are the hard case: then each
layer has several buckets of dense parameters and several of experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ranks import ranks

SHARDED = dict(overlap=True, distributed_optimizer=True)
RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def _plan_apart(case: Any, **settings: Any) -> None:
    """Compare FSSDP with stock: first one of two groups has no replicas, then the other."""
    import test_late_replicas
    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate.plan import plan_replicas

    stock = tiny_gpt.train(case)
    for without in ((2, 3), (0, 1)):
        apart = dist.get_rank() in without
        planner = test_late_replicas.no_replicas if apart else plan_replicas
        test_late_replicas.replace_planner(planner)
        ours = tiny_gpt.train(case, hook=tiny_gpt.fssdp_hook(**settings))
        assert (ours.replicas > 0) == (not apart or "late_replicas" in settings)
        difference = tiny_gpt.difference(stock, ours)
        assert difference["loss"] <= 1e-5 and difference["grad"] <= 1e-5, (case, difference)


@ranks(4)
def test_buckets_of_every_size() -> None:
    """From one parameter to everything."""
    import tiny_gpt

    case = tiny_gpt.Case(**SHARDED)
    tiny_gpt.initialize(case)
    for size in (1, 1000, 4000, 10**9):
        _plan_apart(dataclasses.replace(case, bucket_size=size))


@ranks(4)
def test_settings_that_move_gathers() -> None:
    """Buckets of one parameter each."""
    import tiny_gpt

    case = tiny_gpt.Case(**SHARDED, bucket_size=1)
    tiny_gpt.initialize(case)
    for lifetime in ("microbatch", "layer"):
        _plan_apart(dataclasses.replace(case, settings=tuple(RECOMPUTE.items())), lifetime=lifetime)
    _plan_apart(dataclasses.replace(case, ddp=(("align_param_gather", True),)))
    shared = (("moe_shared_expert_intermediate_size", 32), ("moe_shared_expert_overlap", True))
    _plan_apart(dataclasses.replace(case, settings=shared), late_replicas=2)
