"""Homes move in extreme orders, and in none.

Oracle: unconverted Megatron on the same ranks: bit for bit without replicas, with the optimizer's state; within a
tolerance with them (`training_with_moves`). Layouts and settings: `test_layouts`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from layouts import SHARDED
from ranks import ranks

pytestmark = pytest.mark.newest


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
