"""Worlds, placements and Algorithm 1 against tables worked out by hand.

The planner is a heuristic with decided tie-breaks, so its oracle is a set of small cases computed on paper from the
paper's steps and ``design.md`` section 4; properties of any plan (slots, overlap degree, homes, who may be copied) are
checked on random layers by plain counting. If ranks could disagree on a plan, a copy were placed that cannot pay, a
slot were used twice or a home moved, these fail.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hecate.plan import Placement, World, plan_guests, split_quotas

PROPERTY = settings(max_examples=150, deadline=None, derandomize=True, database=None)

# Three ranks, homes 0 / 3 / 1, as Algorithm 2 may leave them
UNEVEN_HOME = [1, 1, 2, 1]
UNEVEN_TABLE = [[-1, -1, -1, -1], [0, 1, 3, -1], [2, -1, -1, -1]]


def _uneven() -> Placement:
    return Placement(home=np.array(UNEVEN_HOME), table=np.array(UNEVEN_TABLE))


def _one_node(num_ranks: int) -> World:
    return World(node=(0,) * num_ranks)


def _pairs(placement: Placement) -> list[tuple[int, int]]:
    """(expert, rank) of every guest, sorted."""
    return [(expert, rank) for expert, rank, _ in placement.guests]


# world


@pytest.mark.parametrize(
    ("names", "node"),
    [
        (["a"] * 4 + ["b"] * 4, (0, 0, 0, 0, 1, 1, 1, 1)),
        (["b", "a", "b"], (0, 1, 0)),
        (["x"], (0,)),
    ],
)
def test_ranks_of_one_machine_share_a_node(names: list[str], node: tuple[int, ...]) -> None:
    world = World.from_names(names)
    assert world.node == node
    assert world.num_ranks == len(node)


def test_a_world_has_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match=r"node=\(\)"):
        World.from_names([])


def test_a_world_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        _one_node(2).node = (0, 1)


# placement


def test_initial_is_megatrons_partition() -> None:
    placement = Placement.initial(6, 3, num_slots=2)
    assert placement.home.tolist() == [0, 0, 1, 1, 2, 2]
    assert placement.table.tolist() == [[0, 1, -1, -1], [2, 3, -1, -1], [4, 5, -1, -1]]
    assert (placement.num_experts, placement.num_ranks, placement.slots_per_rank) == (6, 3, 4)
    assert placement.holders.astype(int).tolist() == [
        [1, 0, 0],
        [1, 0, 0],
        [0, 1, 0],
        [0, 1, 0],
        [0, 0, 1],
        [0, 0, 1],
    ]
    assert placement.guests == ()
    assert placement.num_guests == 0
    assert not placement.is_guest.any()


@pytest.mark.parametrize(("num_experts", "num_ranks", "num_slots"), [(4, 4, 0), (4, 4, 3), (8, 1, 0), (64, 8, 56)])
def test_slots_from_none_to_every_expert_elsewhere(num_experts: int, num_ranks: int, num_slots: int) -> None:
    placement = Placement.initial(num_experts, num_ranks, num_slots=num_slots)
    assert placement.table.shape == (num_ranks, num_experts // num_ranks + num_slots)


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_slots", "message"),
    [
        (10, 4, 0, "num_experts=10 is not divisible by 4 ranks; use 8 or 12"),
        (3, 4, 0, "num_experts=3 is not divisible by 4 ranks; use 4"),
        (8, 4, 7, "slots=7 is out of range: a rank that is home to 2 of 8 experts can host 0 to 6 guests"),
        (8, 4, -1, "slots=-1 is out of range: a rank that is home to 2 of 8 experts can host 0 to 6 guests"),
        (8, 1, 1, "slots=1 is out of range: a rank that is home to 8 of 8 experts can host 0 to 0 guests"),
    ],
)
def test_impossible_partitions_say_what_is_possible(
    num_experts: int, num_ranks: int, num_slots: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Placement.initial(num_experts, num_ranks, num_slots=num_slots)


def test_guests_take_the_lowest_free_slot_in_the_given_order() -> None:
    placement = Placement.initial(6, 3, num_slots=2).with_guests([(5, 0), (0, 2), (3, 0), (0, 1)])
    assert placement.table.tolist() == [[0, 1, 5, 3], [2, 3, 0, -1], [4, 5, 0, -1]]
    assert placement.guests == ((0, 1, 2), (0, 2, 2), (3, 0, 3), (5, 0, 2))  # by expert, then rank
    assert placement.num_guests == 4
    assert placement.is_guest.astype(int).tolist() == [[0, 0, 1, 1], [0, 0, 1, 0], [0, 0, 1, 0]]
    assert placement.holders.astype(int).tolist() == [
        [1, 1, 1],
        [1, 0, 0],
        [0, 1, 0],
        [1, 1, 0],
        [0, 0, 1],
        [1, 0, 1],
    ]
    assert [placement.slot_of(0, rank) for rank in range(3)] == [0, 2, 2]
    assert placement.slot_of(3, 0) == 3
    assert placement.slot_of(5, 2) == 1


def test_with_guests_replaces_the_guests_and_leaves_the_original() -> None:
    bare = Placement.initial(4, 2, num_slots=1)
    first = bare.with_guests([(0, 1), (3, 0)])
    second = first.with_guests([(1, 1)])
    assert bare.table.tolist() == [[0, 1, -1], [2, 3, -1]]
    assert first.table.tolist() == [[0, 1, 3], [2, 3, 0]]
    assert second.table.tolist() == [[0, 1, -1], [2, 3, 1]]
    assert second.with_guests(()).table.tolist() == bare.table.tolist()
    assert [p.home.tolist() for p in (bare, first, second)] == [[0, 0, 1, 1]] * 3


@pytest.mark.parametrize(
    ("guests", "message"),
    [
        ([(0, 1), (1, 1)], r"no slot left on rank 1 for a guest of expert 1: \[2, 3, 0\]"),
        ([(2, 1)], r"rank 1 holds an expert twice: slots \[2, 3, 2\]"),  # its own expert
        ([(9, 1)], r"no expert 9 or no rank 1: there are 4 and 2"),
        ([(-1, 1)], r"no expert -1 or no rank 1: there are 4 and 2"),  # -1 means an empty slot in the table
        ([(0, 2)], r"no expert 0 or no rank 2: there are 4 and 2"),
        ([(0, -1)], r"no expert 0 or no rank -1: there are 4 and 2"),
    ],
)
def test_guests_that_cannot_be_placed(guests: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement.initial(4, 2, num_slots=1).with_guests(guests)


def test_a_guest_twice_on_one_rank() -> None:
    with pytest.raises(ValueError, match=r"rank 1 holds an expert twice: slots \[2, 3, 0, 0\]"):
        Placement.initial(4, 2, num_slots=2).with_guests([(0, 1), (0, 1)])


def test_without_slots_there_are_no_guests() -> None:
    with pytest.raises(ValueError, match=r"no slot left on rank 1 for a guest of expert 0: \[2, 3\]"):
        Placement.initial(4, 2, num_slots=0).with_guests([(0, 1)])


def test_homes_may_be_uneven() -> None:
    placement = _uneven().with_guests([(2, 0), (0, 2), (0, 0), (2, 1)])
    assert placement.table.tolist() == [[2, 0, -1, -1], [0, 1, 3, 2], [2, 0, -1, -1]]
    assert placement.home.tolist() == UNEVEN_HOME
    assert placement.guests == ((0, 0, 1), (0, 2, 1), (2, 0, 0), (2, 1, 3))
    assert placement.is_guest.astype(int).tolist() == [[1, 1, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]]
    assert placement.with_guests(()).table.tolist() == UNEVEN_TABLE


def test_a_guest_slot_may_lie_below_a_home_slot() -> None:
    placement = Placement(home=np.array([0, 1]), table=np.array([[1, 0], [-1, 1]]))
    assert placement.guests == ((1, 0, 0),)
    assert (placement.slot_of(0, 0), placement.slot_of(1, 0), placement.slot_of(1, 1)) == (1, 0, 1)
    assert placement.with_guests([(0, 1)]).table.tolist() == [[-1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("home", "table", "message"),
    [
        ([0, 0], [[0], [1]], r"expert 1 has its home on rank 0, whose slots are \[0\]"),
        ([0, 1], [[0, 0], [1, -1]], r"rank 0 holds an expert twice: slots \[0, 0\]"),
        ([0, 1], [[0, -1], [-1, -1]], r"expert 1 has its home on rank 1, whose slots are \[-1, -1\]"),
        ([0, 2], [[0], [1]], r"home must name ranks 0 to 1, got \[0, 2\]"),
        ([0, -1], [[0], [1]], r"home must name ranks 0 to 1, got \[0, -1\]"),
        ([0, 1], [[0, 2], [1, -1]], r"table must name experts 0 to 1 or -1, got \[\[0, 2\], \[1, -1\]\]"),
        ([0, 1], [[0, -2], [1, -1]], r"table must name experts 0 to 1 or -1, got \[\[0, -2\], \[1, -1\]\]"),
    ],
)
def test_tables_that_contradict_the_homes(home: list[int], table: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(home=np.array(home), table=np.array(table))


def test_a_placement_is_immutable() -> None:
    placement = Placement.initial(4, 2, num_slots=1).with_guests([(0, 1)])
    with pytest.raises(dataclasses.FrozenInstanceError):
        placement.home = np.zeros(4, dtype=int)
    for array in (placement.home, placement.table, placement.holders, placement.is_guest):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


# Algorithm 1, worked out by hand


def test_candidates_that_fit_go_everywhere() -> None:
    # t = 2 <= 3 slots: experts 0 and 1 are the two hottest, and 40 and 30 are above the mean of 20
    placement = Placement.initial(4, 4, num_slots=3)
    planned = plan_guests(np.array([40, 30, 5, 5]), placement, _one_node(4), overlap_degree=2)
    assert _pairs(planned) == [(0, 1), (0, 2), (0, 3), (1, 0), (1, 2), (1, 3)]


def test_an_expert_whose_home_is_not_above_the_mean_stays_alone() -> None:
    # t = 2, but expert 1 with 15 tokens is below the mean of 20
    placement = Placement.initial(4, 4, num_slots=3)
    planned = plan_guests(np.array([40, 15, 13, 12]), placement, _one_node(4), overlap_degree=2)
    assert _pairs(planned) == [(0, 1), (0, 2), (0, 3)]


def test_the_hottest_expert_may_live_on_an_average_rank() -> None:
    # rank loads 25 40 25 10, mean 25: expert 0 is the hottest, yet only rank 1 (experts 2 and 3) is above the mean
    forecast = np.array([25, 0, 20, 20, 15, 10, 10, 0])
    placement = Placement.initial(8, 4, num_slots=1)
    assert _pairs(plan_guests(forecast, placement, _one_node(4), overlap_degree=1)) == []
    assert {expert for expert, _ in _pairs(plan_guests(forecast, placement, _one_node(4)))} == {2, 3}


def test_slots_are_shared_by_load_and_the_leftover_goes_to_the_highest_load_per_copy() -> None:
    # t = 2 > 1 slot: 4 slots for 40 : 20 are 2.67 and 1.33, so 2 and 1; 40 / 3 > 20 / 2 gives the last one to expert 0
    forecast = np.array([40, 2, 20, 10, 4, 4, 2, 2])
    planned = plan_guests(forecast, Placement.initial(8, 4, num_slots=1), _one_node(4), overlap_degree=2)
    assert _pairs(planned) == [(0, 1), (0, 2), (0, 3), (2, 0)]


def test_an_experts_copies_spread_over_nodes_then_over_the_least_loaded_ranks() -> None:
    # experts 0 and 1 (40 tokens each) live on rank 0; ranks 1-7 forecast 1 2 3 | 4 5 6 7; 8 slots make 4 copies each.
    # expert 0: node 1 -> rank 4 (4); one copy on each node now -> rank 1 (1); node 1 -> rank 5 (5); even -> rank 2 (2)
    # expert 1 gets what is left: ranks 6, 3 and 7; rank 0 is its home
    forecast = np.array([40, 40, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0])
    world = World(node=(0, 0, 0, 0, 1, 1, 1, 1))
    planned = plan_guests(forecast, Placement.initial(16, 8, num_slots=1), world, overlap_degree=2)
    assert _pairs(planned) == [(0, 1), (0, 2), (0, 4), (0, 5), (1, 3), (1, 6), (1, 7)]


def test_a_rank_with_more_free_slots_goes_before_a_less_loaded_one() -> None:
    # rank 0: experts 0 1 2 with 10 each, no free slot; free 1 2 1 on ranks 1-3, which forecast 1 2 1; mean 8.5.
    # 4 slots for three equals: 1 1 1 and the leftover to the lowest index. Expert 0: rank 2 (2 free), rank 1 (tie with
    # rank 3); expert 1: rank 3, whose load of 1 is now below rank 2's; expert 2: the last slot
    home = np.array([0, 0, 0, 1, 1, 2, 3, 3])
    table = np.array([[0, 1, 2], [3, 4, -1], [5, -1, -1], [6, 7, -1]])
    forecast = np.array([10, 10, 10, 1, 0, 2, 1, 0])
    planned = plan_guests(forecast, Placement(home=home, table=table), _one_node(4), overlap_degree=3)
    assert _pairs(planned) == [(0, 1), (0, 2), (1, 3), (2, 2)]


def test_a_home_that_shares_its_expert_counts_as_less_loaded() -> None:
    # rank loads 0 25 28 22, mean 18.75; the four slots go to experts 5 (19 x 4 / 75), 2, 3 and 6, by load per copy.
    # expert 5: rank 0, which leaves 9.5 of its 19 on rank 2; so expert 2 prefers rank 2 (18.5) to rank 3 (22)
    forecast = np.array([0, 0, 13, 12, 9, 19, 11, 11])
    planned = plan_guests(forecast, Placement.initial(8, 4, num_slots=1), _one_node(4))
    assert _pairs(planned) == [(2, 2), (3, 3), (5, 0), (6, 1)]


def test_slots_beyond_the_overlap_degree_are_not_shared_out() -> None:
    # free 0 3 1 1, but t = 2 fetches use 0 2 1 1: four slots, two copies for each of experts 0 and 1 on rank 0.
    # expert 0: rank 1 (2 free), then rank 2 (1 token) before rank 3 (2); expert 1: ranks 1 and 3
    home = np.array([0, 0, 0, 0, 1, 2, 2, 2, 3, 3, 3])
    table = np.array([[0, 1, 2, 3], [4, -1, -1, -1], [5, 6, 7, -1], [8, 9, 10, -1]])
    forecast = np.array([10, 10, 0, 0, 1, 1, 0, 0, 2, 0, 0])
    planned = plan_guests(forecast, Placement(home=home, table=table), _one_node(4), overlap_degree=2)
    assert _pairs(planned) == [(0, 1), (0, 2), (1, 1), (1, 3)]


@pytest.mark.parametrize("node", [(0, 0, 0, 0), (5, 5, -1, -1), (3, 2, 1, 0)])
def test_one_expert_with_everything_goes_everywhere_and_nothing_else_moves(node: tuple[int, ...]) -> None:
    planned = plan_guests(np.array([0, 0, 0, 90.5, 0, 0, 0, 0]), Placement.initial(8, 4, num_slots=2), World(node=node))
    assert _pairs(planned) == [(3, 0), (3, 2), (3, 3)]


def test_a_rank_without_homes_takes_guests() -> None:
    # rank loads 0 12 3, mean 5: the three hot experts of rank 1 find 4 + 3 slots on ranks 0 and 2
    planned = plan_guests(np.array([4, 6, 3, 2]), _uneven(), _one_node(3))
    assert _pairs(planned) == [(0, 0), (0, 2), (1, 0), (1, 2), (3, 0), (3, 2)]


@pytest.mark.parametrize(
    ("forecast", "balanced", "copies"),
    [
        ([10, 10, 10, 10], 1.05, False),
        ([10.5, 10.5, 9.5, 9.5], 1.05, False),  # exactly 1.05
        ([10.6, 10.4, 9.5, 9.5], 1.05, True),  # 1.06
        ([10.6, 10.4, 9.5, 9.5], 1.06, False),
        ([30, 10, 0, 0], 3.0, False),
        ([30, 10, 0, 0], 2.9, True),
        ([10, 10, 10, 10], 1.0, False),
        ([10.1, 10, 10, 9.9], 1.0, True),
    ],
)
def test_a_balanced_forecast_copies_nothing(forecast: list[float], balanced: float, copies: bool) -> None:
    placement = Placement.initial(4, 4, num_slots=1)
    planned = plan_guests(np.array(forecast), placement, _one_node(4), balanced=balanced)
    assert (planned.num_guests > 0) == copies


@pytest.mark.parametrize("overlap_degree", [None, 0, 1, 4, 99])
def test_no_tokens_no_guests(overlap_degree: int | None) -> None:
    placement = Placement.initial(4, 4, num_slots=3).with_guests([(0, 1)])
    planned = plan_guests(np.zeros(4), placement, _one_node(4), overlap_degree=overlap_degree)
    assert planned.table.tolist() == [[0, -1, -1, -1], [1, -1, -1, -1], [2, -1, -1, -1], [3, -1, -1, -1]]


def test_no_overlap_no_guests() -> None:
    placement = Placement.initial(4, 4, num_slots=3)
    assert plan_guests(np.array([9, 1, 1, 1]), placement, _one_node(4), overlap_degree=0).num_guests == 0


@pytest.mark.parametrize("overlap_degree", [8, 9, 1000])
def test_an_overlap_degree_beyond_the_experts_is_no_limit(overlap_degree: int) -> None:
    forecast = np.array([40, 2, 20, 10, 4, 4, 2, 2])
    placement = Placement.initial(8, 4, num_slots=2)
    limited = plan_guests(forecast, placement, _one_node(4), overlap_degree=overlap_degree)
    assert limited.num_guests > 0
    assert limited.table.tolist() == plan_guests(forecast, placement, _one_node(4)).table.tolist()


def test_no_slots_no_guests() -> None:
    placement = Placement.initial(4, 4, num_slots=0)
    assert plan_guests(np.array([9, 1, 1, 1]), placement, _one_node(4)).num_guests == 0


def test_one_rank_has_nowhere_to_copy() -> None:
    placement = Placement(home=np.array([0, 0]), table=np.array([[0, 1, -1, -1]]))
    assert plan_guests(np.array([9, 1]), placement, _one_node(1), balanced=0.0).num_guests == 0


def test_guests_of_the_given_placement_do_not_matter() -> None:
    forecast = np.array([40, 30, 5, 5])
    bare = Placement.initial(4, 4, num_slots=1)
    full = bare.with_guests([(2, 0), (3, 1), (2, 3)])
    planned = plan_guests(forecast, full, _one_node(4))
    assert planned.table.tolist() == plan_guests(forecast, bare, _one_node(4)).table.tolist()
    assert full.guests == ((2, 0, 1), (2, 3, 1), (3, 1, 1))


@pytest.mark.parametrize(
    ("forecast", "message"),
    [
        ([1, 2, 3], r"shape \(3,\), expected \[4\]"),
        ([[1, 2, 3, 4]], r"shape \(1, 4\), expected \[4\]"),
        (7, r"shape \(\), expected \[4\]"),
        ([1, 2, float("nan"), 4], "finite and >= 0, got .*nan"),
        ([1, 2, float("inf"), 4], "finite and >= 0, got .*inf"),
        ([1, 2, -0.5, 4], "finite and >= 0, got .*-0.5"),
    ],
)
def test_bad_forecasts_say_what_they_are(forecast: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_guests(np.array(forecast), Placement.initial(4, 2, num_slots=1), _one_node(2))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_world_of_another_size_is_refused(num_ranks: int) -> None:
    with pytest.raises(ValueError, match=f"world has {num_ranks} ranks, the placement 2"):
        plan_guests(np.ones(4), Placement.initial(4, 2, num_slots=1), _one_node(num_ranks))


# any plan


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """Arguments of one `plan_guests`."""

    forecast: np.ndarray  # [E]
    placement: Placement
    world: World
    overlap_degree: int | None

    def plan(self) -> Placement:
        return plan_guests(self.forecast, self.placement, self.world, overlap_degree=self.overlap_degree)

    def __repr__(self) -> str:  # what hypothesis prints for a failing case
        return (
            f"Layer(forecast={self.forecast.tolist()}, home={self.placement.home.tolist()}, "
            f"table={self.placement.table.tolist()}, node={self.world.node}, overlap_degree={self.overlap_degree})"
        )


@st.composite
def _layers(draw: st.DrawFn) -> Layer:
    """Any homes (also none on a rank), any free slots per rank, any nodes, steep forecasts."""
    num_ranks = draw(st.integers(1, 8))
    home = draw(st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=16))
    room = draw(st.integers(0, 4))
    most = max(Counter(home).values()) + room
    table = np.full((num_ranks, most), -1)
    for r in range(num_ranks):
        own = [e for e, owner in enumerate(home) if owner == r]
        table[r, : len(own)] = own
    load = st.one_of(st.just(0.0), st.integers(0, 9).map(float), st.floats(0, 1e6), st.just(1e300), st.just(1e-300))
    return Layer(
        forecast=np.array(draw(st.lists(load, min_size=len(home), max_size=len(home)))),
        placement=Placement(home=np.array(home), table=table),
        world=World(node=tuple(draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks)))),
        overlap_degree=draw(st.one_of(st.none(), st.integers(0, len(home) + 2))),
    )


@PROPERTY
@given(_layers())
def test_plans_keep_homes_slots_and_overlap_degree(layer: Layer) -> None:
    planned = layer.plan()
    assert planned.home.tolist() == layer.placement.home.tolist()
    own = np.where(layer.placement.table >= 0, layer.placement.table, planned.table)
    assert planned.table.tolist() == own.tolist()  # what was there stays; guests fill empty slots only
    limit = len(layer.forecast) if layer.overlap_degree is None else layer.overlap_degree
    per_rank = Counter(rank for _, rank in _pairs(planned))
    assert max(per_rank.values(), default=0) <= limit
    assert len({expert for expert, _ in _pairs(planned)}) <= limit
    assert all(planned.home[expert] != rank for expert, rank in _pairs(planned))


@PROPERTY
@given(_layers())
def test_only_the_hottest_experts_of_overloaded_homes_are_copied(layer: Layer) -> None:
    load = [Fraction(0)] * layer.placement.num_ranks
    for expert, tokens in enumerate(layer.forecast.tolist()):
        load[int(layer.placement.home[expert])] += Fraction(tokens)
    limit = len(layer.forecast) if layer.overlap_degree is None else layer.overlap_degree
    for expert in {expert for expert, _ in _pairs(layer.plan())}:
        above = load[int(layer.placement.home[expert])] * len(load) / sum(load)
        assert above > 1 - 1e-12  # a home exactly at the mean may look above it: floats round
        hotter = [e for e, tokens in enumerate(layer.forecast) if (-tokens, e) < (-layer.forecast[expert], expert)]
        assert len(hotter) < limit
        assert layer.forecast[expert] > 0


@PROPERTY
@given(_layers())
def test_same_input_same_plan_and_the_input_is_left_alone(layer: Layer) -> None:
    forecast, table = layer.forecast.copy(), layer.placement.table.copy()
    first = layer.plan()
    layer.forecast.setflags(write=False)
    again = layer.plan()
    assert first.table.tolist() == again.table.tolist()
    assert layer.forecast.tolist() == forecast.tolist()
    assert layer.placement.table.tolist() == table.tolist()


@PROPERTY
@given(_layers(), st.sampled_from([0.25, 2.0, 1024.0]))
def test_only_proportions_matter(layer: Layer, factor: float) -> None:
    moderate = np.clip(layer.forecast, 0, 1e6) * (layer.forecast >= 1e-3)  # a power of two then scales exactly
    one = dataclasses.replace(layer, forecast=moderate).plan()
    assert dataclasses.replace(layer, forecast=moderate * factor).plan().table.tolist() == one.table.tolist()


@PROPERTY
@given(_layers(), st.integers(0, 2**32 - 1))
def test_guests_never_raise_the_largest_rank_load(layer: Layer, seed: int) -> None:
    loads = np.random.default_rng(seed).integers(0, 50, size=(layer.placement.num_ranks, len(layer.forecast)))
    alone = np.bincount(layer.placement.home, weights=loads.sum(axis=0))
    shared = split_quotas(loads, layer.plan(), layer.world).rank_load(layer.placement.num_ranks)
    assert shared.max() <= alone.max()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_good_forecast_and_a_few_slots_take_most_of_the_imbalance(num_slots: int) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        forecast = rng.multinomial(8 * 4096, rng.dirichlet(np.full(64, 0.5)))
        placement = Placement.initial(64, 8, num_slots=num_slots)
        planned = plan_guests(forecast, placement, World((0, 0, 0, 0, 1, 1, 1, 1)))
        loads = np.vstack([forecast, np.zeros((7, 64), dtype=forecast.dtype)])
        before = np.bincount(placement.home, weights=forecast).max() - forecast.sum() / 8
        after = split_quotas(loads, planned, World((0, 0, 0, 0, 1, 1, 1, 1))).rank_load(8).max()
        assert after - forecast.sum() / 8 <= before / 2
