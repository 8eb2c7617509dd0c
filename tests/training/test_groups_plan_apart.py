"""Expert-parallel groups that share gradients plan replicas of their own. Oracle: the same model without FSSDP."""

from __future__ import annotations

import pytest
from ranks import ranks


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="joined homes make buckets ready in another order")
@pytest.mark.parametrize("distributed_optimizer", [False, True])
@ranks(4)
def test_one_group_without_replicas_over_several_buckets(distributed_optimizer: bool) -> None:
    import test_late_replicas
    import tiny_gpt
    import torch.distributed as dist

    case = tiny_gpt.Case(distributed_optimizer=distributed_optimizer, overlap=True, accumulate=2)
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case, steps=4)
    if dist.get_rank() >= 2:
        test_late_replicas.replace_planner(test_late_replicas.no_replicas)
    ours = tiny_gpt.train(case, steps=4, hook=tiny_gpt.fssdp_hook())
    dist.barrier()
    assert tiny_gpt.difference(stock, ours)["loss"] <= 1e-5
