"""Replicas after the gate. Oracle: the exact largest load before and after, and cases that one price decides."""

from __future__ import annotations

import numpy as np
import pytest
from plan_cases import check_placement, some_homes, some_load, some_replicas, some_world
from seeds import seeds

from megatron_hecate.plan import CopyCost, Placement, World, add_late_replicas, largest_load

pytestmark = pytest.mark.fast
ONE_NODE, TWO_NODES = World((0,) * 4), World((0, 0, 1, 1))
HOMES = Placement.initial(4, 4, num_slots=1)
HOT = np.array([400, 100, 100, 100])  # 175 on average: two late replicas of expert 0 are enough


def late(load: np.ndarray, placement: Placement, world: World, **given: float) -> Placement:
    most, across = int(given.pop("most", 8)), bool(given.pop("across", True))
    return add_late_replicas(
        load, placement, world, cost=CopyCost(**given), max_copies=most, across_nodes=across
    )


@seeds(50)
def test_late_replicas_win_more_than_they_cost(seed: int) -> None:
    rng = np.random.default_rng(seed)
    before = some_replicas(rng, some_homes(rng))
    world, load = some_world(rng, before.num_ranks), some_load(rng, before.num_experts)
    near, far, most, across = (
        float(rng.choice([0, 10, 1000])),
        2000.0,
        int(rng.integers(0, 6)),
        bool(rng.integers(2)),
    )
    after = late(load, before, world, near=near, far=far, most=most, across=across)
    check_placement(after)
    added = np.argwhere(after.holders & ~before.holders)
    assert len(added) <= most
    is_far = [world.node[before.home[e]] != world.node[r] for e, r in added]
    assert across or not any(is_far)
    received, sent = np.zeros(before.num_ranks), np.zeros(before.num_ranks)
    for (e, r), crosses in zip(added, is_far, strict=True):
        received[r] += far if crosses else near
        sent[before.home[e]] += far if crosses else near
    paid = max(received.max(), sent.max())
    assert largest_load(load, after) + paid <= largest_load(load, before)
    assert after is before or len(added)


def test_doing_nothing_is_the_normal_answer() -> None:
    balanced = np.full(4, 100)
    assert late(balanced, HOMES, ONE_NODE) is HOMES
    assert late(np.zeros(4, np.int64), HOMES, ONE_NODE) is HOMES
    assert late(HOT, HOMES, ONE_NODE, near=300.0) is HOMES
    assert late(HOT, HOMES, ONE_NODE, most=0) is HOMES
    assert late(HOT, HOMES, ONE_NODE, routing=300.0) is HOMES


def test_a_further_expert_of_a_rank_must_pay_and_an_overwritten_one_is_paid() -> None:
    assert late(HOT, HOMES, ONE_NODE, computing=230.0) is HOMES
    # 225 tokens less for one replica on each of two ranks; both compute at the same time
    assert largest_load(HOT, late(HOT, HOMES, ONE_NODE, computing=220.0)) == 175
    planned = HOMES.with_replicas([(1, 0), (2, 1), (3, 2), (1, 3)])
    assert largest_load(HOT, late(HOT, planned, ONE_NODE, computing=1e9)) == 175
    # one rank has a replica already: a first one on other ranks costs nothing more
    beside = HOMES.with_replicas([(1, 0)])
    assert largest_load(HOT, late(HOT, beside, ONE_NODE, computing=1e9)) == 175


def test_a_jump_is_corrected() -> None:
    after = late(HOT, HOMES, ONE_NODE)
    assert largest_load(HOT, after) == 175 and after.num_replicas >= 2
    assert late(HOT, HOMES, ONE_NODE, most=1).num_replicas == 1


def test_across_nodes_only_where_allowed_and_paid() -> None:
    inside = late(HOT, HOMES, TWO_NODES, across=False)
    assert inside.num_replicas == 1 and inside.table[1, 1] == 0 and largest_load(HOT, inside) == 250
    assert late(HOT, HOMES, TWO_NODES, far=1.0).holders[0, 2:].any()
    assert not late(HOT, HOMES, TWO_NODES, far=1000.0).holders[0, 2:].any()
