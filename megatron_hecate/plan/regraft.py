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

LOOK: int = 8  # swaps looked at each time, and ranks for a guest that lost its place
LESS: float = 0.999  # a swap must reduce the squares to this


@compiled
def improve(guest: np.ndarray, home: np.ndarray, most: np.ndarray, scenarios: Scenarios, tries: int) -> float:
    """Swap guests, in place, while that reduces the squares; about ``tries`` choices are judged. Returns the squares.

    No expert gets more than ``most`` [E] guests, and none that has no tokens in the forecast.
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
        for i in range(found if squares == before else 0):  # the guest that makes room takes the place of a third
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
    none = np.float32(0)
    for r in range(len(can)):
        e = guest[r]
        price[r] = 0
        for s in range(len(lacking)):
            free[s, r] = none if blocked[r, s] else can[r, s]
            loss[s, r] = 0
            if e >= 0:
                now, left = min(tokens[e, s], taken[e, s]), min(tokens[e, s], taken[e, s] - can[r, s])
                loss[s, r] = max(none, now - left - can[home[e], s])
                price[r] += loss[s, r] * (2 * lacking[s] + loss[s, r])


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
    hosts, lacking, tokens = outcome.hosts, outcome.lacking, scenarios.tokens
    size, num_ranks = free.shape
    none, two = np.float32(0), np.float32(2)
    worth = np.empty(len(home), np.float32)  # of one more host, at most
    more = np.empty(size, np.float32)
    for e in range(len(home)):
        worth[e] = 0
        if hosts[e] < most[e] and tokens[e, 0] > 0:
            _more(e, home, scenarios, outcome, blocked, more)
            for s in range(size):
                worth[e] += more[s] * (two * lacking[s] - more[s])
    change = np.empty(num_ranks, np.float32)  # of the squares
    best = shortlist(LOOK, 0.0)
    for e in np.argsort(-worth):
        if worth[e] <= -best.cost[-1]:
            break
        _more(e, home, scenarios, outcome, blocked, more)
        change[:] = none
        for s in range(size):
            most_gained, before = more[s], two * lacking[s]
            for r in range(num_ranks):
                lacks = loss[s, r] - (free[s, r] if free[s, r] < most_gained else most_gained)
                change[r] += lacks * (before + lacks)
        for r in range(num_ranks):
            if guest[r] >= 0 and guest[r] != e and home[e] != r:
                offer(best, change[r], r, e)
    return best


@compiled
def _more(
    expert: int, home: np.ndarray, scenarios: Scenarios, outcome: Outcome, blocked: np.ndarray, more: np.ndarray
) -> None:
    """``more`` [S]: tokens that have no room and that another host of ``expert`` could take."""
    taken, lacking, tokens = outcome.taken, outcome.lacking, scenarios.tokens
    r, hosted, none = home[expert], outcome.hosts[expert] > 0, np.float32(0)
    for s in range(len(lacking)):
        left = tokens[expert, s] - taken[expert, s] if hosted else tokens[expert, s]
        left = left if left < lacking[s] else lacking[s]
        more[s] = left if blocked[r, s] and left > none else none


@compiled
def _places(guest: np.ndarray, home: np.ndarray, price: np.ndarray, taken: int, expert: int) -> Shortlist:
    """Ranks other than ``taken`` that could host ``expert`` instead of their guest, the cheapest first."""
    best = shortlist(LOOK, np.inf)
    for r in range(len(guest)):
        if r != taken and guest[r] >= 0 and guest[r] != expert and home[expert] != r:
            offer(best, price[r], r, guest[r])
    return best
