"""What the last plan is kept for, and that it is not kept where it does not fit any more.

Oracles: object identity for what is kept; `assert_valid`, plain counting and the counting bound of `random_plans` for
what is not. If an old plan were returned for new homes or limits, ranks would host what they have no room for; if a
good one were not, graphs and schedules would be made again for nothing.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_plans import PROPERTY, Layer, counting_bound, guests_per_rank, layers, one_node, pairs, plan_limits

from megatron_hecate.plan import Placement, assert_valid, plan_guests


def _largest(load: np.ndarray, placement: Placement) -> float:
    """In mean rank loads."""
    return counting_bound(load.astype(np.int64), placement.holders) / (load.sum() / placement.num_ranks)


@PROPERTY
@given(layers(), plan_limits(), st.integers(0, 3), st.booleans(), st.randoms(use_true_random=False))
def test_with_scenarios_and_a_last_plan_every_limit_is_kept(
    layer: Layer, limits: dict[str, float | None], count: int, reconsider: bool, random: Random
) -> None:
    """The last plan was made for other loads and other limits; only where it keeps these may it be returned."""
    shuffled = layer.forecast[random.sample(range(len(layer.forecast)), len(layer.forecast))]
    last = plan_guests(shuffled, layer.placement, layer.world)
    scenarios = np.clip(layer.forecast + np.arange(count)[:, None] * shuffled, 0, 1e6)
    limits = dict(limits, previous=last, reconsider=reconsider)
    planned = layer.plan(scenarios=lambda: scenarios, **limits)
    assert_valid(planned)
    assert planned.home.tolist() == layer.placement.home.tolist()
    leaving = np.bincount(planned.home[[e for e, _ in pairs(planned)]], minlength=planned.num_ranks)
    degree = len(layer.forecast) if layer.overlap_degree is None else layer.overlap_degree
    assert max(guests_per_rank(planned).values(), default=0) <= degree
    assert planned.num_guests <= (np.inf if limits["copies"] is None else limits["copies"])
    assert leaving.max(initial=0) <= (np.inf if limits["egress"] is None else limits["egress"])
    assert all(layer.forecast[e] > 0 for e, _ in pairs(planned))
    again = layer.plan(scenarios=lambda: scenarios, **limits)
    assert again is planned or again.table.tolist() == planned.table.tolist()


def test_an_expert_without_tokens_in_the_forecast_gets_no_guest() -> None:
    layer = Placement.initial(8, 4, num_slots=1)
    forecast, may_come = np.array([9.0, 5, 5, 5, 5, 5, 0, 0]), np.array([[1.0, 1, 1, 1, 1, 1, 9, 1]])
    planned = plan_guests(forecast, layer, one_node(4), scenarios=lambda: may_come)
    assert planned.num_guests and all(forecast[e] > 0 for e, _ in pairs(planned))


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("copy_tokens", [0.0, 0.1])
def test_a_plan_that_is_still_good_is_returned_itself(slots: int, copy_tokens: float) -> None:
    forecast = np.array([100.0, 21, 17, 20, 19, 22, 18, 23])
    layer, world = Placement.initial(8, 4, num_slots=slots), one_node(4)
    known = dict(scenarios=lambda: forecast * np.array([[1.0], [1.01]]), copy_tokens=copy_tokens)
    first = plan_guests(forecast, layer, world, **known)
    assert first.num_guests
    assert plan_guests(forecast, layer, world, previous=first, **known) is first
    drifted = forecast + np.array([1, -1, 0, 1, 0, -1, 0, 0])
    assert plan_guests(drifted, layer, world, previous=first, **known) is first


@pytest.mark.parametrize("slots", [1, 2])
def test_a_plan_that_does_not_fit_any_more_is_not_kept(slots: int) -> None:
    forecast = np.array([100.0, 20, 20, 20, 20, 20, 20, 20])
    layer, world = Placement.initial(8, 4, num_slots=slots), one_node(4)
    known = dict(scenarios=lambda: forecast[None])
    last = plan_guests(forecast, layer, world, **known)
    jumped = np.roll(forecast, 4)
    assert _largest(jumped, plan_guests(jumped, layer, world, previous=last, scenarios=lambda: jumped[None])) <= 1.02
    assert plan_guests(forecast, layer, world, previous=last, copies=1, **known).num_guests <= 1
    assert plan_guests(np.array([100.0] * 8), layer, world, previous=layer, **known).num_guests  # without guests
    mirrored = Placement(home=layer.home[::-1].copy(), table=np.where(layer.table < 0, -1, 7 - layer.table))
    assert_valid(plan_guests(forecast, mirrored, world, previous=last, **known), num_slots=slots)
    wider = plan_guests(forecast, Placement.initial(8, 4, num_slots=slots + 1), world, previous=last, **known)
    assert_valid(wider, num_slots=slots + 1)


@pytest.mark.parametrize("reconsider", [False, True])
def test_a_price_does_not_hide_what_may_come(reconsider: bool) -> None:
    """The forecast is balanced by guests as they are, what may come by others."""
    forecast = np.array([100.0, 20, 20, 20, 20, 20, 20, 20])
    layer, world = Placement.initial(8, 4, num_slots=1), one_node(4)
    last = plan_guests(forecast, layer, world)
    may_come = np.array([80.0, 10, 10, 10, 80, 10, 10, 30])
    paid = dict(previous=last, copy_tokens=0.01, reconsider=reconsider)
    assert _largest(may_come, plan_guests(forecast, layer, world, **paid)) > 1.1
    assert _largest(may_come, plan_guests(forecast, layer, world, scenarios=lambda: may_come[None], **paid)) <= 1.07


@pytest.mark.parametrize("limits", [dict(copies=1), dict(egress=1)])
def test_a_new_limit_counts_though_plans_are_not_reconsidered(limits: dict[str, int]) -> None:
    forecast = np.array([100.0, 20, 20, 20, 20, 20, 20, 20])
    layer, world = Placement.initial(8, 4, num_slots=1), one_node(4)
    last = plan_guests(forecast, layer, world)
    assert np.bincount(layer.home[[e for e, _ in pairs(last)]]).max() > 1
    planned = plan_guests(forecast, layer, world, previous=last, copy_tokens=0.01, reconsider=False, **limits)
    assert np.bincount(layer.home[[e for e, _ in pairs(planned)]]).max() == 1
    assert planned.num_guests <= limits.get("copies", 4)


def test_a_plan_for_other_homes_or_experts_is_not_looked_at() -> None:
    """Tables of one shape, which the homes do not fit."""
    forecast, world = np.array([100.0, 1.0]), one_node(2)
    layer = Placement(home=np.array([0, 1]), table=np.array([[0, -1], [1, -1]]))
    exchanged = Placement(home=np.array([1, 0]), table=np.array([[0, 1], [1, 0]]))
    planned = plan_guests(forecast, layer, world, previous=exchanged)
    assert planned.home.tolist() == [0, 1] and planned is not exchanged
    narrow, many = Placement(home=np.array([0, 1]), table=np.array([[0] + [-1] * 300, [1] + [-1] * 300])), 301
    other = Placement(home=np.full(many, 1), table=np.stack([[many - 1] + [-1] * 300, np.arange(many)]))
    assert_valid(plan_guests(forecast, narrow, world, previous=other, overlap_degree=1))
