"""What a late guest is said to win at most, against what it wins.

Oracle: scipy's linear programs over the tokens that each holder serves: the smallest largest rank load with the guest,
and the fewest tokens above the mean. They know nothing of blocked sets, parts or flows. If a bound were too high, late
guests that pay would be passed over; if bounds said little, all of them would be solved.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from random_plans import lp_largest
from scipy.optimize import linprog

from megatron_hecate.plan import Placement
from megatron_hecate.plan.flow import NO_LIMIT, level
from megatron_hecate.plan.links import holders, links_of
from megatron_hecate.plan.outlook import Outlook, hope, outlook

SEEDS = 60  # per block
GUESTS = 6  # solved per layer


class _Layer(NamedTuple):
    """A layer whose tokens are where `flow.level` moved them."""

    placement: Placement
    total: np.ndarray  # [E]
    served: np.ndarray  # [R, P]
    inside: np.ndarray  # [R] the blocked set
    ahead: Outlook


def _random(seed: int) -> _Layer | None:
    """Any homes, up to three guests on a rank, steep loads; None where the mean is reached."""
    rng = np.random.default_rng(seed)
    num_ranks, num_experts, most = (int(rng.integers(2, end)) for end in (9, 12, 4))
    home = rng.integers(0, num_ranks, num_experts)
    held = []
    for r in range(num_ranks):
        guests = rng.permutation(np.flatnonzero(home != r))[: int(rng.integers(0, most + 1))]
        held.append([*np.flatnonzero(home == r), *guests])
    table = np.full((num_ranks, max(map(len, held)) + 1), -1)
    for r, experts in enumerate(held):
        table[r, : len(experts)] = experts
    total = rng.integers(0, rng.choice([3, 30, 1000]), num_experts) * rng.choice([0, 1, 1, 5], num_experts)
    placement = Placement(home=home, table=table)
    (num_ranks, slots), flat = table.shape, table.ravel().astype(np.int64)
    count, where = holders(flat, np.arange(num_ranks), len(home), 0)
    links = links_of(flat, count, where, num_ranks)
    served = np.where(home[flat] == np.arange(len(flat)) // slots, total[flat], 0) * (flat >= 0)
    load = served.reshape(num_ranks, slots).sum(axis=1)
    inside = np.empty(num_ranks, np.bool_)
    least, mean = np.zeros(len(home), np.int64), int(load.sum()) // num_ranks
    if level(links, flat, served, load, least, 0, NO_LIMIT, inside, NO_LIMIT, True) <= mean + 1:
        return None
    return _Layer(placement, total, served.reshape(table.shape), inside, outlook(links, served, load, inside, mean))


def _fewest_above(total: np.ndarray, held: np.ndarray, mean: int) -> int:
    """Tokens above the mean that no split of the loads over the holders [E, R] can avoid."""
    num_ranks = held.shape[1]
    e, r = np.nonzero(held & (total > 0)[:, None])
    cost = np.concatenate([np.zeros(len(e)), np.ones(num_ranks)])
    sums, below = np.zeros((len(total), len(cost))), np.zeros((num_ranks, len(cost)))
    sums[e, np.arange(len(e))] = 1
    below[r, np.arange(len(e))] = 1
    below[np.arange(num_ranks), len(e) + np.arange(num_ranks)] = -1
    result = linprog(cost, A_ub=below, b_ub=np.full(num_ranks, mean), A_eq=sums, b_eq=total, method="highs")
    assert result.status == 0, result.message
    return round(result.fun)


@pytest.mark.parametrize("block", range(5))
def test_no_guest_leaves_less(block: int) -> None:
    looked, exact = 0, 0
    for seed in range(block * SEEDS, block * SEEDS + SEEDS):
        layer = _random(seed)
        if layer is None:
            continue
        placement, total, served, inside, ahead = layer
        num_ranks, table, home = placement.num_ranks, placement.table, placement.home
        # tokens stop at the mean rounded up, and count above the mean rounded down
        assert 0 <= ahead.excess - _fewest_above(total, placement.holders, ahead.mean) <= placement.num_ranks, seed
        assert -(-ahead.caught // ahead.size) == lp_largest(total, placement.holders), seed
        rng, guests = np.random.default_rng(seed), []
        for e in range(placement.num_experts):
            movable = int(served[inside][table[inside] == e].sum())
            for r in np.flatnonzero(~placement.holders[e] & ~inside).tolist():
                free = [p for p in range(table.shape[1]) if table[r, p] < 0 or home[table[r, p]] != r]
                guests += [(e, r, p, movable) for p in free if movable]
        for e, r, p, movable in rng.permutation(np.array(guests, int).reshape(-1, 4))[:GUESTS].tolist():
            held = placement.holders.copy()
            held[e, r] = True
            if table[r, p] >= 0:
                held[table[r, p], r] = False
            largest, left = hope(ahead, r, movable)
            best, fewest = lp_largest(total, held), _fewest_above(total, held, ahead.mean)
            assert largest <= best, f"{seed=} {e=} {r=} {p=}: {largest} and not {best}"
            assert left <= fewest + num_ranks, f"{seed=} {e=} {r=} {p=}: {left} and not {fewest}"
            looked += 1
            exact += fewest - left <= num_ranks
    assert looked > 100
    assert exact > looked / 2, f"{exact} of {looked}"
