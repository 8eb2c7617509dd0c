"""Guests for many loads, no more than one to a rank: a compiled core of the planner.

A plan is judged by the square of the tokens above the cap, summed over the loads that may come (sample average
approximation: Kleywegt, Shapiro and Homem-de-Mello, SIAM Journal on Optimization 12(2), 2002). Ranks that lack room,
and those whose tokens come from them and could be more, are *blocked*: a minimum cut. A swap helps that gives one of
their experts to a rank that is not; it moves a branch of the forest from one tree to another.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled
from megatron_hecate.plan.forest import Outcome, Scenarios, judge, outcome_for
from megatron_hecate.plan.lanes import LANES, below, dot, kept, least, load, positive, store, zeros
from megatron_hecate.plan.shortlist import Shortlist, listed, offer, shortlist

LOOK: int = 5  # swaps looked at each time,
THIRDS: int = 4  # ranks looked at when the guest that makes room goes on to a third rank,
WITH_THIRDS: int = 3  # for so many of those swaps
LESS: float = 0.999  # a swap must reduce the squares to this


@compiled
def improve(guest: np.ndarray, home: np.ndarray, most: np.ndarray, scenarios: Scenarios, tries: int) -> float:
    """Swap guests, in place, while that reduces the squares; about ``tries`` choices are judged. Returns the squares.

    No expert gets more than ``most`` [E] guests.
    """
    outcome, after = outcome_for(scenarios), outcome_for(scenarios)
    blocked, price = np.empty(len(guest), np.int64), np.empty(len(guest))
    loss = np.empty((len(guest), LANES), np.float32)
    squares, trees = judge(guest, home, scenarios, outcome)
    while squares > 0 and tries > 0:
        before = squares
        _block(guest, home, scenarios, outcome, trees, blocked)
        _price(guest, home, scenarios, outcome, loss, price)
        swap = _candidates(guest, home, most, scenarios, outcome, blocked, loss)
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
        for i in range(min(found, WITH_THIRDS) if squares == before else 0):
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


@borrowing
def _block(
    guest: np.ndarray, home: np.ndarray, scenarios: Scenarios, outcome: Outcome, trees: int, blocked: np.ndarray
) -> None:
    """``blocked`` [R] bits: in which scenarios a rank's tokens are, or compete with, those that find no room."""
    num_ranks = len(guest)
    for r in range(num_ranks):
        blocked[r] = below(zeros(), load(outcome.lack, r))
    for turn in range(3):  # twice round the cycles, then down the trees
        first, last = (num_ranks - 1, trees) if turn < 2 else (trees - 1, 0)
        for i in range(first, last - 1, -1):
            r = outcome.order[i]
            e = guest[r]
            if e >= 0 and blocked[home[e]] != 0:
                blocked[r] |= blocked[home[e]] & below(load(outcome.taken, e), load(scenarios.tokens, e))


@borrowing
def _price(
    guest: np.ndarray, home: np.ndarray, scenarios: Scenarios, outcome: Outcome, loss: np.ndarray, price: np.ndarray
) -> None:
    """What it would cost that a rank gives up its guest.

    ``loss`` [R, 32] tokens that the guest's home, by itself, could no longer place; ``price`` [R] what these add to the
    squares.
    """
    lacking = load(outcome.lacking, 0)
    for r in range(len(guest)):
        e = guest[r]
        lost = zeros()
        if e >= 0:
            tokens, taken = load(scenarios.tokens, e), load(outcome.taken, e)
            left = least(tokens, taken - load(outcome.can, r))
            lost = positive(least(tokens, taken) - left - load(outcome.can, home[e]))
        store(loss, r, lost)
        price[r] = dot(lost, lacking + lacking + lost)


@compiled
def _candidates(
    guest: np.ndarray,
    home: np.ndarray,
    most: np.ndarray,
    scenarios: Scenarios,
    outcome: Outcome,
    blocked: np.ndarray,
    loss: np.ndarray,
) -> Shortlist:
    """Swaps that give an expert of a blocked rank to one that is not, the most promising first."""
    lacking = load(outcome.lacking, 0)
    more = np.empty((len(home), LANES), np.float32)  # tokens that have no room and that another host could take
    worth = np.zeros(len(home))  # of that, at most
    for r in range(len(guest)):
        if blocked[r] == 0:
            continue
        gap = kept(lacking, blocked[r])
        for i in range(scenarios.first[r], scenarios.first[r + 1]):
            e = scenarios.experts[i]
            if outcome.hosts[e] >= most[e]:
                continue
            waiting = load(scenarios.tokens, e)
            if outcome.hosts[e] > 0:
                waiting = positive(waiting - load(outcome.taken, e))
            waiting = least(waiting, gap)
            store(more, e, waiting)
            worth[e] = dot(waiting, lacking + lacking - waiting)
    best = shortlist(LOOK, 0.0)
    while True:
        e = np.argmax(worth)
        if worth[e] <= -best.cost[-1]:
            break
        worth[e] = 0
        waiting = load(more, e)
        for r in range(len(guest)):
            if guest[r] >= 0 and guest[r] != e and home[e] != r:
                lacks = load(loss, r) - least(kept(load(outcome.can, r), ~blocked[r]), waiting)
                offer(best, dot(lacks, lacking + lacking + lacks), r, e)
    return best


@compiled
def _places(guest: np.ndarray, home: np.ndarray, price: np.ndarray, taken: int, expert: int) -> Shortlist:
    """Ranks other than ``taken`` that could host ``expert`` instead of their guest, the cheapest first."""
    best = shortlist(THIRDS, np.inf)
    for r in range(len(guest)):
        if r != taken and guest[r] >= 0 and guest[r] != expert and home[expert] != r:
            offer(best, price[r], r, guest[r])
    return best
