"""Homes move under every setting of FSSDP, in extreme orders, with grouped experts and with quantized ones.

Oracle: unconverted Megatron on the same ranks: bit for bit without replicas, with the optimizer's state; within a
tolerance with them (`training_with_moves`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ranks import ranks
from training_with_moves import params

pytestmark = pytest.mark.newest
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SHARDED = dict(distributed_optimizer=True, overlap=True)
# name: (ranks, fields of tiny_gpt.Case, fields of TransformerConfig, settings of FSSDP)
SETTINGS: dict[str, tuple[int, dict, dict, dict]] = {
    "one-slot": (2, {}, {}, dict(slots=1)),
    "microbatch": (
        2,
        dict(accumulate=2, **SHARDED),
        dict(num_layers=4),
        dict(lifetime="layer"),
    ),
    "layer-recompute": (2, dict(accumulate=2), dict(FULL, num_layers=4), dict(lifetime="layer")),
    "late": (2, dict(accumulate=2, **SHARDED), {}, dict(late_replicas=4)),
    "late-layer-recompute": (
        2,
        dict(accumulate=2),
        dict(FULL, num_layers=4),
        dict(lifetime="layer", late_replicas=4),
    ),
    "nvlink": (2, SHARDED, {}, dict(transport="nvlink")),
    "nvlink-layer": (
        2,
        dict(accumulate=2),
        dict(num_layers=4),
        dict(transport="nvlink", lifetime="layer"),
    ),
    "pp2-vpp2-late": (
        4,
        dict(pp=2, vpp=2, accumulate=4, **SHARDED),
        {},
        dict(lifetime="layer", late_replicas=3),
    ),
}


@pytest.mark.parametrize("name", params(SETTINGS, 2, "nvlink"))
@ranks(2)
def test_two_ranks(name: str) -> None:
    _compare(name)


@pytest.mark.parametrize("name", params(SETTINGS, 4))
@ranks(4)
def test_four_ranks(name: str) -> None:
    _compare(name)


def _compare(name: str) -> None:
    import planners
    import tiny_gpt
    import training_with_moves

    _, fields, of_model, settings = SETTINGS[name]
    case = tiny_gpt.Case(**fields, settings=tuple(of_model.items()))
    tiny_gpt.initialize(case)
    if settings.get("late_replicas"):
        planners.replace_planner(planners.coldest_experts)
    training_with_moves.compare(case, repeat=True, **settings)


def _rotated(look: int, num_experts: int) -> np.ndarray:
    """Every expert goes to the next rank."""
    return np.roll(np.arange(num_experts), look % 100 * num_experts // 4)


def _swapped(look: int, num_experts: int) -> np.ndarray:
    """Two experts change places, then back."""
    order = np.arange(num_experts)
    if look % 2:
        order[[0, -1]] = order[[-1, 0]]
    return order


def _within(look: int, num_experts: int) -> np.ndarray:
    """Experts change places on their rank alone."""
    return (
        np.arange(num_experts).reshape(-1, num_experts // 4)[:, ::-1].ravel()
        if look % 2
        else np.arange(num_experts)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [_rotated, _swapped, _within],
    ids=["rotated", "swapped", "within a rank"],
)
@ranks(4)
def test_orders(order: Callable) -> None:
    """Then once more in rounds of one cycle each."""
    import tiny_gpt
    import training_with_moves

    from megatron_hecate.homes import mover

    case = tiny_gpt.Case(ep=4, **SHARDED)
    tiny_gpt.initialize(case)
    training_with_moves.compare(case, orders=order, may_be_back=True, slots=0)
    mover.ROUND_BYTES = 1
    training_with_moves.compare(case, orders=order, may_be_back=True)


@pytest.mark.slow
@ranks(2)
def test_all_tokens_for_one_expert() -> None:
    import tiny_gpt
    import training_with_moves

    case = tiny_gpt.Case(one_expert=True, accumulate=2)
    tiny_gpt.initialize(case)
    training_with_moves.compare(case)


@ranks(2)
def test_the_homes_that_are_there_already() -> None:
    """Nothing moves where they are found again: the stock dispatcher stays in use."""
    import rehoming_hooks
    import tiny_gpt

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    stock = tiny_gpt.train(case, steps=5)
    ours = tiny_gpt.train(
        case, steps=5, hook=rehoming_hooks.rehoming_hook(lambda _, size: np.arange(size), slots=0)
    )
    assert tiny_gpt.difference(stock, ours) == tiny_gpt.SAME
    layer = tiny_gpt.moe_layers(ours.chunks)[0]
    mover = layer.prefetcher.rehoming.homes
    assert mover.received_bytes == 0 and not mover.are_moved
    assert layer.token_dispatcher is layer.fssdp.stock_dispatcher
