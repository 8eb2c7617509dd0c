"""Copies are made as far as they pay.

Oracle: costs by hand, that not even perfect balance would pay, and plans of every kind, made without asking whether
they can pay. If copies were priced wrongly, balanced layers would pay for copies, or hot ones wait for them.
"""

from __future__ import annotations

import dataclasses
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_plans import PROPERTY, SMALL, Case, Layer, cases, counting_bound, guests_per_rank, layers, one_node

from megatron_hecate.plan import Placement, assert_valid, plan_guests
from megatron_hecate.plan.best import plan_best
from megatron_hecate.plan.bill import Bill
from megatron_hecate.plan.flow import NO_LIMIT
from megatron_hecate.plan.search import SCALE, scale
from megatron_hecate.plan.swap import GOAL


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


def copies_of(placement: Placement) -> tuple[int, int]:
    """Guests of the rank that has most, and copies that leave the rank which lends most."""
    sent = np.bincount(placement.home[placement.table[placement.is_guest]], minlength=1)
    return int(placement.is_guest.sum(axis=1).max()), int(sent.max())


@SMALL
@given(cases(ranks=5, experts=8), st.floats(0, 2), st.integers(0, 3), st.floats(0, 1))
def test_no_placement_costs_less_than_the_least(case: Case, price: float, hidden: int, contention: float) -> None:
    received, sent = copies_of(case.placement)
    total = case.load.sum(axis=0)
    load = np.bincount(case.placement.home, weights=total, minlength=case.placement.num_ranks)
    bill = Bill(load.mean(), load.max(), price * load.mean(), hidden, contention, routing=0.0)
    if received and total.any():
        left = counting_bound(total, case.placement.holders)
        cost = bill.of(left, received=received, busiest=max(received, sent))
        assert bill.least(received=received, sent=sent) <= cost * (1 + 1e-12)
        assert bill.least(received=received, sent=NO_LIMIT) <= cost * (1 + 1e-12)


@PROPERTY
@given(st.floats(1, 500), st.floats(0, 2), st.integers(0, 9), st.floats(0, 1), st.integers(1, 9), st.integers(0, 600))
def test_the_least_is_that_of_all_counts(
    peak: float, copy: float, hidden: int, contention: float, received: int, sent: int
) -> None:
    bill = Bill(mean=1.0, peak=peak, copy=copy, hidden=hidden, contention=contention, routing=0.1)
    each = [bill.of(peak / (1 + b), received=received, busiest=max(received, b)) for b in range(sent + 1)]
    assert bill.least(received=received, sent=sent) == pytest.approx(min(each), rel=1e-12)


@SMALL
@given(layers(), st.floats(1e-4, 0.5), st.integers(0, 2), st.floats(0, 1), st.floats(0, 0.1))
def test_plans_that_are_not_made_would_not_be_cheaper(
    layer: Layer, price: float, hidden: int, contention: float, routing: float
) -> None:
    bare, forecast = layer.placement.without_guests, np.clip(layer.forecast, 0, 1e6)
    scaled, total, largest = scale(forecast, bare.home, bare.num_ranks)
    mean, unit = total / bare.num_ranks, SCALE / bare.num_ranks
    bill = Bill(int(scaled.sum()) / bare.num_ranks, largest, price * unit, hidden, contention, routing * unit)
    prices = dict(copy_tokens=price * mean, hidden=hidden, contention=contention, routing_tokens=routing * mean)
    planned = dataclasses.replace(layer, forecast=forecast).plan(**prices)
    costs = {bare.table.tobytes(): float(largest)}
    degree = bare.free_slots.max() if layer.overlap_degree is None else min(layer.overlap_degree, bare.free_slots.max())
    none = np.empty((len(forecast), 0), np.float32)
    for per_rank in range(1, degree + 1) if total > 0 else ():
        for leaving in (2 * per_rank, NO_LIMIT):
            limits = per_rank, NO_LIMIT, leaving
            table, left, received, sent = plan_best(
                scaled, none, bare.home, bare.table, layer.world.order, bare.table, *limits, True, False
            )
            if received:
                cost = bill.of(left, received=received, busiest=max(received, sent))
                costs[table.tobytes()] = min(cost, costs.get(table.tobytes(), np.inf))
    assert costs[planned.table.tobytes()] <= min(costs.values()) + bill.mean / GOAL + 1


def test_a_plan_that_may_send_many_copies_but_sends_few_is_made() -> None:
    # with one hidden copy, five guests that go round cost next to nothing, and leave the mean
    layer = Placement.initial(5, 5, num_slots=2)
    planned = plan_guests(np.array([19.0, 26, 18, 17, 20]), layer, one_node(5), copy_tokens=2.0, hidden=1)
    assert copies_of(planned) == (1, 1)
    assert counting_bound(np.array([19, 26, 18, 17, 20]), planned.holders) == 20


@pytest.mark.parametrize(
    ("forecast", "limits"),
    [
        ([11.0, 7, 4], dict(copy_tokens=0.36667, hidden=2)),
        ([11.0, 7, 4], dict(copy_tokens=0.36667, hidden=2, egress=2)),
        ([4.0, 2, 0], dict(copy_tokens=0.4)),
    ],
)
def test_a_plan_is_not_exchanged_for_more_copies_that_win_nothing(forecast: list[float], limits: dict) -> None:
    layer = Placement.initial(3, 3, num_slots=2)
    last = layer.with_guests([(0, 1), (0, 2), (1, 0)])
    assert plan_guests(np.array(forecast), layer, one_node(3), previous=last, **limits) is last


# as above, 40 tokens on one of 4 ranks: 3 copies cost 10 + 3c, and are kept up to 10 each, where 2 are cheaper
@pytest.mark.parametrize(
    ("copy_tokens", "as_before", "anew"), [(1.0, 3, 3), (8.0, 3, 2), (9.9, 3, 2), (13.0, 2, 2), (14.0, 0, 0)]
)
def test_until_plans_are_reconsidered_the_last_says_how_many_guests(
    copy_tokens: float, as_before: int, anew: int
) -> None:
    layer, forecast = Placement.initial(4, 4, num_slots=1), np.array([0, 40, 0, 0])
    last = plan_guests(forecast, layer, one_node(4))
    assert last.num_guests == 3
    for reconsider, guests in ((False, as_before), (True, anew)):
        prices = dict(copy_tokens=copy_tokens, previous=last, reconsider=reconsider)
        assert plan_guests(forecast, layer, one_node(4), **prices).num_guests == guests
    prices = dict(copy_tokens=copy_tokens, previous=layer, reconsider=False)  # no guests to go on with
    assert plan_guests(forecast, layer, one_node(4), **prices).num_guests == anew


@PROPERTY
@given(layers(), st.floats(1e-3, 0.5), st.integers(0, 2), st.floats(0, 1), st.randoms(use_true_random=False))
def test_plans_that_are_not_reconsidered(
    layer: Layer, price: float, hidden: int, contention: float, random: Random
) -> None:
    """No more guests on a rank, and no more copies from one, than before (or twice the guests), and none where
    even perfect balance would not pay for them."""
    layer = dataclasses.replace(layer, forecast=np.clip(layer.forecast, 0, 1e6))
    forecast, num_ranks = layer.forecast, layer.placement.num_ranks
    last = plan_guests(np.array(random.sample(forecast.tolist(), len(forecast))), layer.placement, layer.world)
    load = np.bincount(layer.placement.home, weights=forecast, minlength=num_ranks)
    prices = dict(copy_tokens=max(price * load.mean(), 1e-9), hidden=hidden, contention=contention)
    planned = layer.plan(previous=last, reconsider=False, **prices)
    assert_valid(planned)
    received, sent = copies_of(planned)
    if not received:
        return
    exposed = max(0, max(received, sent) - hidden)
    copies = exposed + contention * (max(received, sent) - exposed)
    assert load.mean() + prices["copy_tokens"] * copies <= load.max() * (1 + 1e-6)
    anew = layer.plan(previous=last, **prices)
    if planned.table.tolist() != anew.table.tolist():
        received_last, sent_last = copies_of(last)
        assert received <= received_last and sent <= max(sent_last, 2 * received_last)
        if layer.overlap_degree is not None:
            assert received <= layer.overlap_degree
