"""Guests for many loads, no more than one to a rank: a compiled core of the planner.

A plan is judged by the square of the tokens above the cap, summed over the loads that may come (sample average
approximation: Kleywegt, Shapiro and Homem-de-Mello, SIAM Journal on Optimization 12(2), 2002). Ranks that lack room,
and those whose tokens come from them and could be more, are *blocked*: a minimum cut. A swap helps that gives one of
their experts to a rank that is not; it moves a branch of the forest from one tree to another.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.compiled import compiled
from megatron_hecate.plan.forest import Outcome, Scenarios, judge, outcome_for
from megatron_hecate.plan.shortlist import Shortlist, listed, offer, shortlist

LOOK: int = 8  # swaps looked at each time,
THIRDS: int = 4  # those of them, and ranks for each, when the guest that makes room goes on to a third rank
LESS: float = 0.999  # a swap must reduce the squares to this


@compiled
def improve(guest: np.ndarray, home: np.ndarray, most: np.ndarray, scenarios: Scenarios, tries: int) -> float:
    """Swap guests, in place, while that reduces the squares; about ``tries`` choices are judged. Returns the squares.

    No expert gets more than ``most`` [E] guests.
    """
    num_ranks, size = scenarios.room.shape
    outcome, after = outcome_for(scenarios), outcome_for(scenarios)
    blocked = np.empty((num_ranks, size), np.bool_)
    free, loss = np.empty((size, num_ranks), np.float32), np.empty((size, num_ranks), np.float32)
    price = np.empty(num_ranks, np.float32)
    squares, trees = judge(guest, home, scenarios, outcome)
    while squares > 0 and tries > 0:
        before = squares
        _block(guest, home, scenarios, outcome, trees, blocked)
        _price(guest, home, scenarios, outcome, blocked, free, loss, price)
        swap = _candidates(guest, home, most, scenarios, outcome, blocked, free, loss)
        found = listed(swap)
        for i in range(found):
            r, e = swap.place[i], swap.expert[i]
            old = guest[r]
            if outcome.hosts[e] == most[e]:
                continue
            guest[r] = e
            tries -= 1
            now, its_trees = judge(guest, home, scenarios, after)
            if now <= squares * LESS:
                squares, trees = now, its_trees
                outcome, after = after, outcome
            else:
                guest[r] = old
                if squares < before:
                    break  # what the others promise was before that
        # otherwise the guest that makes room takes the place of a third
        for i in range(min(found, THIRDS) if squares == before else 0):
            r = swap.place[i]
            old = guest[r]
            guest[r] = swap.expert[i]
            move = _places(guest, home, price, r, old)
            for k in range(listed(move)):
                third, last = move.place[k], move.expert[k]
                guest[third] = old
                tries -= 1
                now, its_trees = judge(guest, home, scenarios, after)
                if now <= squares * LESS:
                    squares, trees = now, its_trees
                    outcome, after = after, outcome
                    break
                guest[third] = last
            if squares < before:
                break
            guest[r] = old
            if tries <= 0:
                break
        if squares == before:
            break
    return squares


@compiled
def _block(
    guest: np.ndarray, home: np.ndarray, scenarios: Scenarios, outcome: Outcome, trees: int, blocked: np.ndarray
) -> None:
    """``blocked`` [R, S]: ranks whose tokens are, or compete with, those that find no room."""
    lack, taken, order, tokens = outcome.lack, outcome.taken, outcome.order, scenarios.tokens
    num_ranks, size = lack.shape
    for r in range(num_ranks):
        for s in range(size):
            blocked[r, s] = lack[r, s] > 0
    for turn in range(3):  # twice round the cycles, then down the trees
        first, last = (num_ranks - 1, trees) if turn < 2 else (trees - 1, 0)
        for i in range(first, last - 1, -1):
            e = guest[order[i]]
            if e < 0:
                continue
            r, lender = order[i], home[e]
            for s in range(size):
                blocked[r, s] |= blocked[lender, s] and taken[e, s] < tokens[e, s]


@compiled
def _price(
    guest: np.ndarray,
    home: np.ndarray,
    scenarios: Scenarios,
    outcome: Outcome,
    blocked: np.ndarray,
    free: np.ndarray,
    loss: np.ndarray,
    price: np.ndarray,
) -> None:
    """What each rank could take of another expert, and what it would cost that it gives up its guest.

    ``free`` [S, R] tokens that a rank which is not blocked can take; ``loss`` [S, R] those that its guest's home, by
    itself, could no longer place; ``price`` [R] what these add to the squares.
    """
    can, taken, lacking, tokens = outcome.can, outcome.taken, outcome.lacking, scenarios.tokens
    none, two = np.float32(0), np.float32(2)
    size, num_ranks = free.shape
    can_take, its_loss = np.empty(size, np.float32), np.empty(size, np.float32)
    for r in range(num_ranks):
        e = guest[r]
        for s in range(size):
            can_take[s] = none if blocked[r, s] else can[r, s]
        if e >= 0:
            lender = home[e]
            for s in range(size):
                now, left = min(tokens[e, s], taken[e, s]), min(tokens[e, s], taken[e, s] - can[r, s])
                its_loss[s] = max(none, now - left - can[lender, s])
        else:
            its_loss[:] = none
        for s in range(size):
            free[s, r], loss[s, r] = can_take[s], its_loss[s]
    price[:] = none
    for s in range(size):
        before = two * lacking[s]
        for r in range(num_ranks):
            price[r] += loss[s, r] * (before + loss[s, r])


@compiled
def _candidates(
    guest: np.ndarray,
    home: np.ndarray,
    most: np.ndarray,
    scenarios: Scenarios,
    outcome: Outcome,
    blocked: np.ndarray,
    free: np.ndarray,
    loss: np.ndarray,
) -> Shortlist:
    """Swaps that give an expert of a blocked rank to one that is not, the most promising first."""
    hosts, taken, lacking = outcome.hosts, outcome.taken, outcome.lacking
    tokens, first, experts = scenarios.tokens, scenarios.first, scenarios.experts
    size, num_ranks = free.shape
    none, two = np.float32(0), np.float32(2)
    more = np.empty((len(home), size), np.float32)  # tokens that have no room and that another host could take
    worth = np.zeros(len(home), np.int64)  # of that, at most; integers can be summed in any order
    gap = np.empty(size, np.float32)
    for r in range(num_ranks):
        if not blocked[r].any():
            continue
        for s in range(size):
            gap[s] = lacking[s] if blocked[r, s] else none
        for i in range(first[r], first[r + 1]):
            e = experts[i]
            if hosts[e] >= most[e]:
                continue
            if hosts[e] > 0:
                for s in range(size):
                    more[e, s] = max(none, min(tokens[e, s] - taken[e, s], gap[s]))
            else:
                for s in range(size):
                    more[e, s] = min(tokens[e, s], gap[s])
            squares = 0
            for s in range(size):
                gained = np.int64(np.int32(more[e, s]))
                squares += gained * (2 * np.int64(np.int32(lacking[s])) - gained)
            worth[e] = squares
    change = np.empty(num_ranks, np.float32)  # of the squares
    best = shortlist(LOOK, 0.0)
    while True:
        e = np.argmax(worth)
        if worth[e] <= -best.cost[-1]:
            break
        worth[e] = 0
        change[:] = none
        for s in range(size):
            most_gained, before = more[e, s], two * lacking[s]
            for r in range(num_ranks):
                lacks = loss[s, r] - (free[s, r] if free[s, r] < most_gained else most_gained)
                change[r] += lacks * (before + lacks)
        for r in range(num_ranks):
            if guest[r] >= 0 and guest[r] != e and home[e] != r:
                offer(best, change[r], r, e)
    return best


@compiled
def _places(guest: np.ndarray, home: np.ndarray, price: np.ndarray, taken: int, expert: int) -> Shortlist:
    """Ranks other than ``taken`` that could host ``expert`` instead of their guest, the cheapest first."""
    best = shortlist(THIRDS, np.inf)
    for r in range(len(guest)):
        if r != taken and guest[r] >= 0 and guest[r] != expert and home[expert] != r:
            offer(best, price[r], r, guest[r])
    return best
