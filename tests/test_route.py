"""Quotas against solvers and counting that know nothing of chains of ranks.

Oracles: hand-written tables; every possible split, enumerated, where it is small; for any loads the counting bound (the
tokens that only a set of ranks can serve must fit on that set: Hall's theorem makes the best such bound the optimum);
scipy's linear programs for the largest rank load and for the tokens that must cross nodes or leave their rank.

If tokens were lost, sent to a rank without the expert, left piled up where a longer chain of ranks could take them, or
sent across nodes without need, the numbers differ; if balancing did not end, the test hangs.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from random_plans import (
    PROPERTY,
    SMALL,
    Case,
    cases,
    counting_bound,
    enumerated,
    lp_largest,
    lp_least,
    one_node,
    placement_of,
    skewed,
)

from megatron_hecate.plan import Placement, Quotas, World, largest_load, split_quotas


def _largest(case: Case, quotas: Quotas) -> int:
    """Largest rank load, counted with Python's integers."""
    load = [0] * case.placement.num_ranks
    for rank, tokens in zip(quotas.rank.tolist(), quotas.tokens.sum(axis=0).tolist(), strict=True):
        load[rank] += tokens
    return max(load)


# hand-written tables


def test_without_guests_every_token_goes_home() -> None:
    load = np.array([[5, 0, 2, 1], [1, 1, 9, 0]])
    quotas = split_quotas(load, Placement.initial(4, 2, num_slots=1), one_node(2))
    assert quotas.expert.tolist() == [0, 1, 2, 3]
    assert quotas.rank.tolist() == [0, 0, 1, 1]
    assert quotas.tokens.tolist() == load.tolist()
    assert quotas.rank_load(2).tolist() == [7, 12]


def test_a_guest_takes_what_its_home_has_too_much_and_own_tokens_stay() -> None:
    # rank 0 would serve 9, rank 1 five: two tokens of expert 0 move, and they are rank 0's own surplus
    placement = Placement.initial(4, 2, num_slots=1).with_guests([(0, 1)])
    quotas = split_quotas(np.array([[8, 1, 1, 0], [2, 0, 1, 1]]), placement, one_node(2))
    assert quotas.expert.tolist() == [0, 0, 1, 2, 3]
    assert quotas.rank.tolist() == [0, 1, 0, 1, 1]
    assert quotas.tokens.tolist() == [[6, 2, 1, 1, 0], [0, 2, 0, 1, 1]]
    assert quotas.rank_load(2).tolist() == [7, 7]


def test_balanced_choices_stay_on_their_node() -> None:
    # expert 0 lives on rank 0 (node 0) and as a guest on rank 3 (node 1): nobody needs to cross
    placement = Placement.initial(4, 4, num_slots=1).with_guests([(0, 3)])
    load = np.array([[4, 8, 0, 0], [4, 0, 0, 0], [4, 0, 8, 0], [4, 0, 0, 0]])
    quotas = split_quotas(load, placement, World(node=(0, 0, 1, 1)))
    assert quotas.expert.tolist() == [0, 0, 1, 2, 3]
    assert quotas.rank.tolist() == [0, 3, 1, 2, 3]
    assert quotas.tokens.tolist() == [[4, 0, 8, 0, 0], [4, 0, 0, 0, 0], [0, 4, 0, 8, 0], [0, 4, 0, 0, 0]]


@pytest.mark.parametrize(
    ("guests", "tokens"),
    [
        ([(0, 3)], [[4, 0], [4, 0], [0, 4], [0, 4]]),  # nodes 0 0 1 1: the home for its node, the guest for the other
        ([(0, 1)], [[4, 0], [0, 4], [4, 0], [4, 0]]),  # rank 1 serves itself, node 1 goes home
        ([(0, 1), (0, 2), (0, 3)], [[4, 0, 0, 0], [0, 4, 0, 0], [0, 0, 4, 0], [0, 0, 0, 4]]),
    ],
)
def test_tokens_take_the_nearest_holder_where_balance_leaves_a_choice(
    guests: list[tuple[int, int]], tokens: list[list[int]]
) -> None:
    # 100 tokens stay on rank 4 whatever the others do, so nothing has to move
    placement = Placement.initial(5, 5, num_slots=1).with_guests(guests)
    load = np.array([[4, 0, 0, 0, 100], [4, 0, 0, 0, 0], [4, 0, 0, 0, 0], [4, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    quotas = split_quotas(load, placement, World(node=(0, 0, 1, 1, 2)))
    assert quotas.tokens[:4, quotas.expert == 0].tolist() == tokens


def test_a_source_without_a_holder_on_its_node_goes_home() -> None:
    placement = Placement.initial(3, 3, num_slots=1).with_guests([(0, 1)])
    load = np.array([[3, 0, 0], [0, 4, 0], [1, 0, 4]])  # one node each: rank 2's token finds 3 tokens at home, 4 there
    quotas = split_quotas(load, placement, World(node=(0, 1, 2)))
    assert quotas.tokens.tolist() == [[3, 0, 0, 0], [0, 0, 4, 0], [1, 0, 0, 4]]


def test_tokens_move_along_a_chain_of_five_ranks() -> None:
    # expert i is shared by ranks i and i + 1 only; 16 tokens per rank is possible in exactly one way
    placement = Placement.initial(5, 5, num_slots=1).with_guests([(i, i + 1) for i in range(4)])
    quotas = split_quotas(np.diag([20, 20, 20, 20, 0]), placement, one_node(5))
    assert quotas.expert.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert quotas.rank.tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert quotas.tokens.sum(axis=0).tolist() == [16, 4, 12, 8, 8, 12, 4, 16, 0]


@pytest.mark.parametrize("backwards", [False, True])
def test_one_surplus_token_travels_the_whole_chain(backwards: bool) -> None:
    num_ranks = 40
    step = -1 if backwards else 1
    order = list(range(num_ranks))[::step]
    placement = Placement.initial(num_ranks, num_ranks, num_slots=1)
    placement = placement.with_guests(list(itertools.pairwise(order)))
    load = np.eye(num_ranks, dtype=int)
    load[order[0], order[0]], load[order[-1], order[-1]] = 2, 0
    assert split_quotas(load, placement, one_node(num_ranks)).rank_load(num_ranks).tolist() == [1] * num_ranks


def test_a_thin_link_in_the_chain_limits_what_passes() -> None:
    # 100 tokens at ranks 0 and 1; only the 7 tokens of expert 1 can go on to rank 2, where 3 are already
    placement = placement_of([[0, 1], [1, 2], [2]], 3)
    quotas = split_quotas(np.array([[93, 0, 0], [0, 7, 0], [0, 0, 3]]), placement, one_node(3))
    assert quotas.rank_load(3).tolist() == [47, 47, 9]  # the 47th token may stay: the largest load is 47 in any case


def test_a_full_pair_does_not_stop_others_from_levelling() -> None:
    # ranks 0 and 1 share only with each other and stay at 50; no rank may pass them
    placement = placement_of([[0, 1], [2, 3], [3, 4]], 5)
    quotas = split_quotas(np.array([[100, 90, 30]]), placement, one_node(5), source_rank=[2])
    assert quotas.rank_load(5).tolist()[:2] == [50, 50]
    assert max(quotas.rank_load(5)) == 50


def test_an_uneven_number_of_tokens_rounds_up_once() -> None:
    quotas = split_quotas(np.array([[10], [0], [0]]), placement_of([[0, 1, 2]], 3), one_node(3))
    assert max(quotas.rank_load(3)) == 4


def test_several_sources_share_a_rank() -> None:
    # rank 0 serves 6, and those are the tokens of its own two sources, before any of rank 1's
    placement = Placement.initial(2, 2, num_slots=1).with_guests([(0, 1)])
    load = np.array([[4, 0], [2, 0], [3, 0], [3, 0]])
    quotas = split_quotas(load, placement, one_node(2), source_rank=[0, 0, 1, 1])
    assert quotas.tokens.tolist() == [[4, 0, 0], [2, 0, 0], [0, 3, 0], [0, 3, 0]]


def test_no_tokens_at_all() -> None:
    placement = Placement.initial(4, 2, num_slots=1).with_guests([(0, 1), (3, 0)])
    quotas = split_quotas(np.zeros((2, 4), dtype=int), placement, one_node(2))
    assert quotas.tokens.shape == (2, 6)
    assert not quotas.tokens.any()


def test_a_rank_that_holds_nothing_serves_nothing() -> None:
    quotas = split_quotas(np.array([[3], [4], [5]]), placement_of([[0, 2]], 3), one_node(3))
    assert quotas.rank_load(3).tolist() == [6, 0, 6]


# properties


@PROPERTY
@given(cases())
def test_every_token_gets_a_holder_of_its_expert(case: Case) -> None:
    quotas = case.split()
    assert quotas.tokens.dtype == np.int64
    assert (quotas.tokens >= 0).all()
    assert quotas.tokens.shape == (len(case.load), len(quotas.expert))
    pairs = list(zip(quotas.expert.tolist(), quotas.rank.tolist(), strict=True))
    assert pairs == sorted((e, r) for r, held in enumerate(case.placement.table.tolist()) for e in held if e >= 0)
    for e in range(case.load.shape[1]):
        assert quotas.tokens[:, quotas.expert == e].sum(axis=1).tolist() == case.load[:, e].tolist()


@PROPERTY
@given(cases())
@example(Case(np.full((1, 2), 10**15), placement_of([[0, 1, 2], [2, 3]], 5), one_node(5), (4,)))
def test_the_largest_rank_load_is_the_counting_bound(case: Case) -> None:
    bound = counting_bound(case.load.sum(axis=0), case.placement.holders)
    assert _largest(case, case.split()) == bound
    assert largest_load(case.load.sum(axis=0), case.placement, case.world) == bound


@SMALL
@given(cases(ranks=3, experts=3, most=4).filter(lambda case: case.load.sum(axis=0).max() <= 7))
def test_no_other_split_has_a_smaller_largest_rank_load(case: Case) -> None:
    assert _largest(case, case.split()) == enumerated(case.load.sum(axis=0), case.placement.holders)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_ranks", "num_experts"), [(4, 16), (8, 32), (16, 64)])
def test_the_largest_rank_load_is_the_linear_programs(num_ranks: int, num_experts: int, seed: int, slots: int) -> None:
    case = skewed(num_ranks, num_experts, seed=seed, slots=slots)
    assert case.placement.num_guests > 0
    assert _largest(case, case.split()) == lp_largest(case.load.sum(axis=0), case.placement.holders)


@SMALL
@given(cases(ranks=5, experts=5, most=2000))
def test_no_assignment_of_sources_crosses_nodes_less_or_stays_home_more(case: Case) -> None:
    quotas = case.split()
    node, ranks = np.array(case.world.node), np.arange(case.placement.num_ranks)
    crosses = (node[:, None] != node[None, :]).astype(float)
    leaves = (ranks[:, None] != ranks[None, :]).astype(float)
    for cost in (crosses, leaves):
        paid = (quotas.tokens * cost[np.asarray(case.source_rank)][:, quotas.rank]).sum()
        assert paid == lp_least(case, quotas, cost)


@PROPERTY
@given(cases())
def test_same_input_same_quotas_and_the_input_is_left_alone(case: Case) -> None:
    first = case.split()
    copy = case.load.copy()
    case.load.setflags(write=False)
    again = split_quotas(np.asfortranarray(case.load), case.placement, case.world, source_rank=list(case.source_rank))
    assert (first.tokens == again.tokens).all()
    assert (first.expert == again.expert).all()
    assert (first.rank == again.rank).all()
    assert (case.load == copy).all()


@PROPERTY
@given(cases(most=200))
def test_rank_load_counts_the_columns_of_each_rank(case: Case) -> None:
    quotas = case.split()
    counted = [0] * case.placement.num_ranks
    for column, rank in enumerate(quotas.rank.tolist()):
        counted[rank] += sum(quotas.tokens[:, column].tolist())
    assert quotas.rank_load(case.placement.num_ranks).tolist() == counted


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_any_integer_type_counts_without_overflow(dtype: type[np.integer]) -> None:
    most = min(int(np.iinfo(dtype).max), 2**60 + 1)  # 2**60 + 1 has no float64
    load = np.array([[most, 0], [most, 0], [most, 1]], dtype=dtype)
    quotas = split_quotas(load, placement_of([[0, 1], [2]], 3), one_node(3))
    assert [sum(row) for row in quotas.tokens[:, :2].tolist()] == [most] * 3
    served = quotas.tokens.sum(axis=0).tolist()
    assert sorted(served[:2]) == [3 * most // 2, 3 * most - 3 * most // 2]


def test_a_group_of_64_ranks_and_256_experts() -> None:
    case = skewed(64, 256, seed=0, slots=2)
    assert _largest(case, case.split()) == lp_largest(case.load.sum(axis=0), case.placement.holders)


# errors


@pytest.mark.parametrize(
    ("load", "source_rank", "message"),
    [
        (np.zeros((2, 3), dtype=int), None, r"shape \(2, 3\), expected \[2, 4\]"),
        (np.zeros((3, 4), dtype=int), None, r"shape \(3, 4\), expected \[2, 4\]"),
        (np.zeros((1, 4), dtype=int), None, r"shape \(1, 4\), expected \[2, 4\]"),
        (np.zeros(4, dtype=int), None, r"shape \(4,\), expected \[2, 4\]"),
        (np.int64(3), None, r"shape \(\), expected \[2, 4\]"),
        (np.zeros((2, 4), dtype=int), [0, 1, 1], r"shape \(2, 4\), expected \[3, 4\]"),
        (np.zeros((2, 4)), None, "dtype float64"),
        (np.zeros((2, 4), dtype=bool), None, "dtype bool"),
        (np.array([[0, 0, 0, 0], [0, -7, 0, 0]]), None, "minimum -7"),
        (np.zeros((2, 4), dtype=int), [0, 2], r"ranks 0 to 1, got \[0, 2\]"),
        (np.zeros((2, 4), dtype=int), [-1, 0], r"ranks 0 to 1, got \[-1, 0\]"),
    ],
)
@pytest.mark.parametrize("guests", [[], [(0, 1)]])
def test_bad_loads_and_sources_say_what_they_are(
    load: Any, source_rank: list[int] | None, message: str, guests: list[tuple[int, int]]
) -> None:
    placement = Placement.initial(4, 2, num_slots=1).with_guests(guests)
    with pytest.raises(ValueError, match=message):
        split_quotas(load, placement, one_node(2), source_rank=source_rank)


@pytest.mark.parametrize("only", [-1, 2])
def test_an_unknown_source_is_refused(only: int) -> None:
    with pytest.raises(ValueError, match=f"only={only} names no source; there are 2"):
        split_quotas(np.zeros((2, 4), dtype=int), Placement.initial(4, 2, num_slots=1), one_node(2), only=only)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_world_of_another_size_is_refused(num_ranks: int) -> None:
    placement = Placement.initial(4, 2, num_slots=1)
    with pytest.raises(ValueError, match=f"world has {num_ranks} ranks, the placement 2"):
        split_quotas(np.zeros((2, 4), dtype=int), placement, one_node(num_ranks))


@pytest.mark.parametrize(
    ("total", "message"),
    [
        ([1, 2], r"total has shape \(2,\), expected \[4\]"),
        ([1, 2, 3, -4], "integers >= 0, got dtype int64 and minimum -4"),
        ([1.0, 2.0, 3.0, 4.0], "integers >= 0, got dtype float64"),
    ],
)
def test_bad_totals_say_what_they_are(total: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        largest_load(np.array(total), Placement.initial(4, 2, num_slots=1), World((0, 0)))
