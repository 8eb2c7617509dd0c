"""Algorithm 1 against plans worked out by hand.

It is a heuristic with decided tie-breaks, so its oracle is a set of small cases computed on paper from the paper's
steps and ``design.md`` section 4; properties of any plan (slots, overlap degree, homes, who may be copied) are checked
on random layers by plain counting. If ranks could disagree on a plan, a copy were placed that cannot pay, a slot were
used twice or a home moved, these fail.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_plans import PROPERTY, Layer, guests_per_rank, homes_only, layers, one_node, pairs

from megatron_hecate.plan import Placement, World, algorithm1, assert_valid, split_quotas

# Three ranks, homes 0 / 3 / 1, as Algorithm 2 may leave them
UNEVEN = homes_only([1, 1, 2, 1], 3, room=1)


def test_candidates_that_fit_go_everywhere() -> None:
    # t = 2 <= 3 slots: experts 0 and 1 are the two hottest, and 40 and 30 are above the mean of 20
    placement = Placement.initial(4, 4, num_slots=3)
    planned = algorithm1(np.array([40, 30, 5, 5]), placement, one_node(4), overlap_degree=2)
    assert pairs(planned) == [(0, 1), (0, 2), (0, 3), (1, 0), (1, 2), (1, 3)]


def test_an_expert_whose_home_is_not_above_the_mean_stays_alone() -> None:
    # t = 2, but expert 1 with 15 tokens is below the mean of 20
    placement = Placement.initial(4, 4, num_slots=3)
    planned = algorithm1(np.array([40, 15, 13, 12]), placement, one_node(4), overlap_degree=2)
    assert pairs(planned) == [(0, 1), (0, 2), (0, 3)]


def test_the_hottest_expert_may_live_on_an_average_rank() -> None:
    # rank loads 25 40 25 10, mean 25: expert 0 is the hottest, yet only rank 1 (experts 2 and 3) is above the mean
    forecast = np.array([25, 0, 20, 20, 15, 10, 10, 0])
    placement = Placement.initial(8, 4, num_slots=1)
    assert pairs(algorithm1(forecast, placement, one_node(4), overlap_degree=1)) == []
    assert {expert for expert, _ in pairs(algorithm1(forecast, placement, one_node(4)))} == {2, 3}


def test_slots_are_shared_by_load_and_the_leftover_goes_to_the_highest_load_per_copy() -> None:
    # t = 2 > 1 slot: 4 slots for 40 : 20 are 2.67 and 1.33, so 2 and 1; 40 / 3 > 20 / 2 gives the last one to expert 0
    forecast = np.array([40, 2, 20, 10, 4, 4, 2, 2])
    planned = algorithm1(forecast, Placement.initial(8, 4, num_slots=1), one_node(4), overlap_degree=2)
    assert pairs(planned) == [(0, 1), (0, 2), (0, 3), (2, 0)]


def test_an_experts_copies_spread_over_nodes_then_over_the_least_loaded_ranks() -> None:
    # experts 0 and 1 (40 tokens each) live on rank 0; ranks 1-7 forecast 1 2 3 | 4 5 6 7; 8 slots make 4 copies each.
    # expert 0: node 1 -> rank 4 (4); one copy on each node now -> rank 1 (1); node 1 -> rank 5 (5); even -> rank 2 (2)
    # expert 1 gets what is left: ranks 6, 3 and 7; rank 0 is its home
    forecast = np.array([40, 40, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0])
    world = World(node=(0, 0, 0, 0, 1, 1, 1, 1))
    planned = algorithm1(forecast, Placement.initial(16, 8, num_slots=1), world, overlap_degree=2)
    assert pairs(planned) == [(0, 1), (0, 2), (0, 4), (0, 5), (1, 3), (1, 6), (1, 7)]


def test_a_rank_with_more_free_slots_goes_before_a_less_loaded_one() -> None:
    # rank 0: experts 0 1 2 with 10 each, no free slot; free 1 2 1 on ranks 1-3, which forecast 1 2 1; mean 8.5.
    # 4 slots for three equals: 1 1 1 and the leftover to the lowest index. Expert 0: rank 2 (2 free), rank 1 (tie with
    # rank 3); expert 1: rank 3, whose load of 1 is now below rank 2's; expert 2: the last slot
    home = np.array([0, 0, 0, 1, 1, 2, 3, 3])
    table = np.array([[0, 1, 2], [3, 4, -1], [5, -1, -1], [6, 7, -1]])
    forecast = np.array([10, 10, 10, 1, 0, 2, 1, 0])
    planned = algorithm1(forecast, Placement(home=home, table=table), one_node(4), overlap_degree=3)
    assert pairs(planned) == [(0, 1), (0, 2), (1, 3), (2, 2)]


def test_a_home_that_shares_its_expert_counts_as_less_loaded() -> None:
    # rank loads 0 25 28 22, mean 18.75; the four slots go to experts 5 (19 x 4 / 75), 2, 3 and 6, by load per copy.
    # expert 5: rank 0, which leaves 9.5 of its 19 on rank 2; so expert 2 prefers rank 2 (18.5) to rank 3 (22)
    forecast = np.array([0, 0, 13, 12, 9, 19, 11, 11])
    planned = algorithm1(forecast, Placement.initial(8, 4, num_slots=1), one_node(4))
    assert pairs(planned) == [(2, 2), (3, 3), (5, 0), (6, 1)]


def test_slots_beyond_the_overlap_degree_are_not_shared_out() -> None:
    # free 0 3 1 1, but t = 2 fetches use 0 2 1 1: four slots, two copies for each of experts 0 and 1 on rank 0.
    # expert 0: rank 1 (2 free), then rank 2 (1 token) before rank 3 (2); expert 1: ranks 1 and 3
    home = np.array([0, 0, 0, 0, 1, 2, 2, 2, 3, 3, 3])
    table = np.array([[0, 1, 2, 3], [4, -1, -1, -1], [5, 6, 7, -1], [8, 9, 10, -1]])
    forecast = np.array([10, 10, 0, 0, 1, 1, 0, 0, 2, 0, 0])
    planned = algorithm1(forecast, Placement(home=home, table=table), one_node(4), overlap_degree=2)
    assert pairs(planned) == [(0, 1), (0, 2), (1, 1), (1, 3)]


@pytest.mark.parametrize("node", [(0, 0, 0, 0), (5, 5, -1, -1), (3, 2, 1, 0)])
def test_one_expert_with_everything_goes_everywhere_and_nothing_else_moves(node: tuple[int, ...]) -> None:
    planned = algorithm1(np.array([0, 0, 0, 90.5, 0, 0, 0, 0]), Placement.initial(8, 4, num_slots=2), World(node=node))
    assert pairs(planned) == [(3, 0), (3, 2), (3, 3)]


def test_a_rank_without_homes_takes_guests() -> None:
    # rank loads 0 12 3, mean 5: the three hot experts of rank 1 find 4 + 3 slots on ranks 0 and 2
    planned = algorithm1(np.array([4, 6, 3, 2]), UNEVEN, one_node(3))
    assert pairs(planned) == [(0, 0), (0, 2), (1, 0), (1, 2), (3, 0), (3, 2)]


@pytest.mark.parametrize(("forecast", "copies"), [([10, 10, 10, 10], False), ([10.1, 10, 10, 9.9], True)])
def test_perfect_balance_copies_nothing(forecast: list[float], copies: bool) -> None:
    planned = algorithm1(np.array(forecast), Placement.initial(4, 4, num_slots=1), one_node(4))
    assert (planned.num_guests > 0) == copies


@pytest.mark.parametrize("overlap_degree", [None, 0, 1, 4, 99])
def test_no_tokens_no_guests(overlap_degree: int | None) -> None:
    placement = Placement.initial(4, 4, num_slots=3).with_guests([(0, 1)])
    planned = algorithm1(np.zeros(4), placement, one_node(4), overlap_degree=overlap_degree)
    assert planned.table.tolist() == [[0, -1, -1, -1], [1, -1, -1, -1], [2, -1, -1, -1], [3, -1, -1, -1]]


def test_no_overlap_no_guests() -> None:
    placement = Placement.initial(4, 4, num_slots=3)
    assert algorithm1(np.array([9, 1, 1, 1]), placement, one_node(4), overlap_degree=0).num_guests == 0


@pytest.mark.parametrize("overlap_degree", [8, 9, 1000])
def test_an_overlap_degree_beyond_the_experts_is_no_limit(overlap_degree: int) -> None:
    forecast = np.array([40, 2, 20, 10, 4, 4, 2, 2])
    placement = Placement.initial(8, 4, num_slots=2)
    limited = algorithm1(forecast, placement, one_node(4), overlap_degree=overlap_degree)
    assert limited.num_guests > 0
    assert limited.table.tolist() == algorithm1(forecast, placement, one_node(4)).table.tolist()


def test_no_slots_no_guests() -> None:
    placement = Placement.initial(4, 4, num_slots=0)
    assert algorithm1(np.array([9, 1, 1, 1]), placement, one_node(4)).num_guests == 0


def test_one_rank_has_nowhere_to_copy() -> None:
    placement = Placement(home=np.array([0, 0]), table=np.array([[0, 1, -1, -1]]))
    assert algorithm1(np.array([9, 1]), placement, one_node(1)).num_guests == 0


def test_guests_of_the_given_placement_do_not_matter() -> None:
    forecast = np.array([40, 30, 5, 5])
    bare = Placement.initial(4, 4, num_slots=1)
    full = bare.with_guests([(2, 0), (3, 1), (2, 3)])
    planned = algorithm1(forecast, full, one_node(4))
    assert planned.table.tolist() == algorithm1(forecast, bare, one_node(4)).table.tolist()
    assert full.guests == ((2, 0, 1), (2, 3, 1), (3, 1, 1))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_world_of_another_size_is_refused(num_ranks: int) -> None:
    with pytest.raises(ValueError, match=f"world has {num_ranks} ranks, the placement 2"):
        algorithm1(np.ones(4), Placement.initial(4, 2, num_slots=1), one_node(num_ranks))


def test_a_negative_overlap_degree_is_refused() -> None:
    with pytest.raises(ValueError, match="overlap_degree=-1"):
        algorithm1(np.ones(4), Placement.initial(4, 2, num_slots=1), one_node(2), overlap_degree=-1)


# any plan


def _plan(layer: Layer) -> Placement:
    return algorithm1(layer.forecast, layer.placement, layer.world, overlap_degree=layer.overlap_degree)


@PROPERTY
@given(layers())
def test_plans_keep_homes_slots_and_overlap_degree(layer: Layer) -> None:
    planned = _plan(layer)
    assert planned.home.tolist() == layer.placement.home.tolist()
    own = np.where(layer.placement.table >= 0, layer.placement.table, planned.table)
    assert planned.table.tolist() == own.tolist()  # what was there stays; guests fill empty slots only
    limit = len(layer.forecast) if layer.overlap_degree is None else layer.overlap_degree
    assert max(guests_per_rank(planned).values(), default=0) <= limit
    assert len({expert for expert, _ in pairs(planned)}) <= limit
    assert_valid(planned)


@PROPERTY
@given(layers())
def test_only_the_hottest_experts_of_overloaded_homes_are_copied(layer: Layer) -> None:
    load = [Fraction(0)] * layer.placement.num_ranks
    for expert, tokens in enumerate(layer.forecast.tolist()):
        load[int(layer.placement.home[expert])] += Fraction(tokens)
    limit = len(layer.forecast) if layer.overlap_degree is None else layer.overlap_degree
    for expert in {expert for expert, _ in pairs(_plan(layer))}:
        above = load[int(layer.placement.home[expert])] * len(load) / sum(load)
        assert above > 1 - 1e-12  # a home exactly at the mean may look above it: floats round
        hotter = [e for e, tokens in enumerate(layer.forecast) if (-tokens, e) < (-layer.forecast[expert], expert)]
        assert len(hotter) < limit
        assert layer.forecast[expert] > 0


@PROPERTY
@given(layers())
def test_same_input_same_plan_and_the_input_is_left_alone(layer: Layer) -> None:
    forecast, table = layer.forecast.copy(), layer.placement.table.copy()
    first = _plan(layer)
    layer.forecast.setflags(write=False)
    again = _plan(layer)
    assert first.table.tolist() == again.table.tolist()
    assert layer.forecast.tolist() == forecast.tolist()
    assert layer.placement.table.tolist() == table.tolist()


@PROPERTY
@given(layers(), st.sampled_from([0.25, 2.0, 1024.0]))
def test_only_proportions_matter(layer: Layer, factor: float) -> None:
    moderate = np.clip(layer.forecast, 0, 1e6) * (layer.forecast >= 1e-3)  # a power of two then scales exactly
    one = _plan(dataclasses.replace(layer, forecast=moderate))
    assert _plan(dataclasses.replace(layer, forecast=moderate * factor)).table.tolist() == one.table.tolist()


@PROPERTY
@given(layers(), st.integers(0, 2**32 - 1))
def test_guests_never_raise_the_largest_rank_load(layer: Layer, seed: int) -> None:
    loads = np.random.default_rng(seed).integers(0, 50, size=(layer.placement.num_ranks, len(layer.forecast)))
    alone = np.bincount(layer.placement.home, weights=loads.sum(axis=0))
    shared = split_quotas(loads, _plan(layer), layer.world).rank_load(layer.placement.num_ranks)
    assert shared.max() <= alone.max()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_good_forecast_and_a_few_slots_take_most_of_the_imbalance(num_slots: int) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        forecast = rng.multinomial(8 * 4096, rng.dirichlet(np.full(64, 0.5)))
        placement = Placement.initial(64, 8, num_slots=num_slots)
        planned = algorithm1(forecast, placement, World((0, 0, 0, 0, 1, 1, 1, 1)))
        loads = np.vstack([forecast, np.zeros((7, 64), dtype=forecast.dtype)])
        before = np.bincount(placement.home, weights=forecast).max() - forecast.sum() / 8
        after = split_quotas(loads, planned, World((0, 0, 0, 0, 1, 1, 1, 1))).rank_load(8).max()
        assert after - forecast.sum() / 8 <= before / 2
