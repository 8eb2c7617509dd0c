"""Frameworks that train between rollouts: equal to stock Megatron, or refused at once with the way out.

Oracle: stock Megatron in the same loop, on the same ranks and data. Each loop is written after the
source of a framework; ``docs/frameworks.md`` names files and versions.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ranks

TOLERANCE = 1e-6  # of losses, relatively, and of parameters


def _train(case: Any, pattern: Any, hook: Any) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, parameters, and the tokens that replicas computed on all ranks."""
    import loops
    import tiny_gpt

    computed = torch.zeros(1)
    loop = loops.Loop(case, hook and tiny_gpt.counting_hook(hook, computed))
    losses = pattern(loop)
    dist.all_reduce(computed)
    return losses, {n: p.detach().clone() for n, p in tiny_gpt._named(loop.chunks)}, int(computed)


def _assert_equal_stock(case: Any, pattern: Any, **settings: Any) -> None:
    import tiny_gpt

    losses, params, _ = _train(case, pattern, None)
    ours, our_params, computed = _train(case, pattern, tiny_gpt.fssdp_hook(**settings))
    assert computed > 0, "no replica computed anything, so nothing was tested"
    loss = max(abs(a - b) / abs(a) for a, b in zip(losses, ours, strict=True))
    param = max(float((params[n] - our_params[n]).abs().max()) for n in params)
    assert loss <= TOLERANCE and param <= TOLERANCE, (loss, param)


@ranks(2)
def test_process_groups_that_are_destroyed_and_made_again() -> None:
    """slime: Megatron's groups are wrapped, destroyed for each rollout and made again behind the wrapper."""
    import loops
    import reloadable_groups
    import tiny_gpt

    reloadable_groups.install()
    case = tiny_gpt.Case(distributed_optimizer=True, skew=4)
    tiny_gpt.initialize(case)

    def between(loop: loops.Loop, step: int) -> None:
        loops.log_probabilities_in_train_mode(loop, step)
        assert reloadable_groups.destroy() > 10
        reloadable_groups.reload()

    def pattern(loop: loops.Loop) -> list[float]:
        return loops.steps(loop, between=between)

    _assert_equal_stock(case, pattern)


@ranks(2)
def test_a_default_process_group_that_is_replaced_is_refused() -> None:
    """slime's default: all groups go, and those that FSSDP needs are unknown to slime."""
    import reloadable_groups
    import tiny_gpt

    reloadable_groups.install()
    case = tiny_gpt.Case(skew=4)
    tiny_gpt.initialize(case)
    run = tiny_gpt.train(case, steps=2, hook=tiny_gpt.fssdp_hook())
    assert run.replicas > 0
    reloadable_groups.replace_world(os.environ["TEST_FOLDER"])
    with pytest.raises(RuntimeError, match="SLIME_DESTROY_WORLD_PROCESS_GROUP=0"):
        run.step(2)
