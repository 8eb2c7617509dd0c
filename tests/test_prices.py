"""Copies are made as far as they pay.

Oracle: costs by hand, and that not even perfect balance would pay. If copies were priced wrongly, balanced layers would
pay for copies, or hot ones wait for them.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_plans import PROPERTY, Layer, guests_per_rank, layers, one_node

from megatron_hecate.plan import Placement, plan_guests


@PROPERTY
@given(layers())
def test_without_a_price_slots_are_filled(layer: Layer) -> None:
    planned = layer.plan()
    loaded = np.flatnonzero(layer.forecast > 1e-9 * layer.forecast.sum()).tolist()  # less may round to nothing
    degree = len(layer.forecast) if layer.overlap_degree is None else layer.overlap_degree
    guests, free = guests_per_rank(planned), planned.free_slots
    for r in range(planned.num_ranks):
        missing = [e for e in loaded if not planned.holders[e, r]]
        assert not missing or not free[r] or guests[r] >= degree, f"rank {r} could host {missing}"


@PROPERTY
@given(layers(), st.floats(1.001, 1e9))
def test_a_price_that_perfect_balance_would_not_pay_copies_nothing(layer: Layer, factor: float) -> None:
    forecast = np.clip(layer.forecast, 0, 1e6)
    load = np.bincount(layer.placement.home, weights=forecast, minlength=layer.placement.num_ranks)
    price = (load.max() - load.mean()) * factor + 1e-6 * load.sum()
    planned = dataclasses.replace(layer, forecast=forecast).plan(copy_tokens=max(price, 1e-9))
    assert planned.num_guests == 0


# 40 tokens on one of 4 ranks, whose home sends all copies: 3 cost 10 + 3c, 2 cost 13.3 + 2c, none 40
@pytest.mark.parametrize(
    ("copy_tokens", "guests"), [(0.0, 3), (1.0, 3), (8.0, 2), (13.0, 2), (14.0, 0), (31.0, 0), (float("inf"), 0)]
)
def test_copies_are_made_while_they_pay(copy_tokens: float, guests: int) -> None:
    placement = Placement.initial(4, 4, num_slots=1)
    assert plan_guests(np.array([0, 40, 0, 0]), placement, one_node(4), copy_tokens=copy_tokens).num_guests == guests


def test_a_second_copy_per_rank_must_pay_too() -> None:
    # rank 0 has two experts of 60: with one guest per rank each goes to one other rank, and that is perfect
    placement = Placement.initial(6, 3, num_slots=2)
    forecast = np.array([60, 60, 0, 0, 0, 0])
    assert guests_per_rank(plan_guests(forecast, placement, one_node(3), copy_tokens=1.0)) == {1: 1, 2: 1}
    assert guests_per_rank(plan_guests(forecast, placement, one_node(3))) == {1: 2, 2: 2}


@pytest.mark.parametrize("copy_tokens", [0.0, 1.0])
@pytest.mark.parametrize(("routing_tokens", "guests"), [(0.0, 3), (25.0, 3), (31.0, 0), (float("inf"), 0)])
def test_routing_must_be_paid_too(routing_tokens: float, copy_tokens: float, guests: int) -> None:
    prices = dict(copy_tokens=copy_tokens, routing_tokens=routing_tokens)
    planned = plan_guests(np.array([0, 40, 0, 0]), Placement.initial(4, 4, num_slots=1), one_node(4), **prices)
    assert planned.num_guests == guests
