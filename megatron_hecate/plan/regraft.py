"""Guests for many loads, no more than one to a rank: a compiled core of the planner.

A plan is judged by the square of the tokens above the cap, summed over the loads that may come (sample average
approximation: Kleywegt, Shapiro and Homem-de-Mello, SIAM Journal on Optimization 12(2), 2002). A swap gives an expert
that lacks hosts to a rank that hosts another; it moves a branch of the forest from one tree to another. What it would
achieve is estimated by following room up and down the forest, and the most promising swaps are judged.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled
from megatron_hecate.plan.forest import (
    Forest,
    Outcome,
    Scenarios,
    arrange,
    forest_for,
    judge,
    judge_change,
    outcome_for,
)
from megatron_hecate.plan.lanes import below, kept, least, load, positive, rows_of, squared, store, zeros
from megatron_hecate.plan.shortlist import Shortlist, empty, listed, offer, shortlist
from megatron_hecate.plan.sort import NONE, index_of, key, largest, value_of

# Looked at in a round, at least; WIDE / ranks is more in smaller groups, where judging takes little time.
EXPERTS: int = 4  # that may get a host,
LOOK: int = 8  # swaps, or twice WIDE / ranks,
THIRDS: int = 3  # and ranks, likewise, when the guest that makes room goes on to a third
WIDE: int = 96
LESS: float = 0.999  # a swap must reduce the squares to this


@compiled
def improve(guest: np.ndarray, home: np.ndarray, most: np.ndarray, scenarios: Scenarios, tries: int) -> float:
    """Swap guests, in place, while that reduces the squares; about ``tries`` choices are judged. Returns the squares.

    No expert gets more than ``most`` [E] guests.
    """
    num_experts, num_ranks = len(home), len(guest)
    forest, other, half = forest_for(num_ranks), forest_for(num_ranks), forest_for(num_ranks)
    outcome, after = outcome_for(num_experts, num_ranks), outcome_for(num_experts, num_ranks)
    need, loss = rows_of(num_ranks, np.int16), rows_of(num_ranks, np.int16)
    other_room = rows_of(num_ranks, np.int16)
    worth, expert = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    cheap = np.empty(num_ranks + 1, np.int64)
    blocked, price = np.empty(num_ranks, np.int64), np.empty(num_ranks)
    wide = WIDE // num_ranks
    swap, move = shortlist(max(LOOK, 2 * wide), 0.0), shortlist(max(THIRDS, 2 * wide), np.inf)
    hosts = np.zeros(num_experts, np.int64)
    for r in range(num_ranks):
        if guest[r] >= 0:
            hosts[guest[r]] += 1
    arrange(guest, home, forest)
    squares = judge(guest, home, forest, scenarios, outcome)
    hopeful = False
    while squares > 0 and tries > 0:
        before = squares
        if hopeful:
            _hope(guest, home, scenarios, outcome, forest, blocked, need, other_room)
            spare, give = outcome.can, other_room
        else:
            _expect(guest, home, scenarios, outcome, forest, need, other_room)
            spare, give = other_room, outcome.can
        _price(guest, home, scenarios, outcome, spare, loss, price)
        _candidates(guest, home, most, hosts, scenarios, outcome, need, give, loss, price, worth, expert, cheap, swap)
        for i in range(listed(swap)):
            r, e = swap.place[i], swap.expert[i]
            old = guest[r]
            if hosts[e] == most[e]:
                continue
            guest[r] = e
            tries -= 1
            now = judge_change(guest, home, r, forest, other, scenarios, after)
            if now <= squares * LESS:
                squares = now
                outcome, after = after, outcome
                hosts[old] -= 1
                hosts[e] += 1
                arrange(guest, home, forest)
            else:
                guest[r] = old
                if squares < before:
                    break  # what the others promise was before that
        if squares < before:
            hopeful = False
            continue
        if not hopeful:
            hopeful = True
            continue
        # otherwise the guest that makes room takes the place of a third
        for i in range(min(listed(swap), max(1, wide))):
            r, e = swap.place[i], swap.expert[i]
            old = guest[r]
            guest[r] = e
            arrange(guest, home, half)
            _places(guest, home, price, r, old, move)
            for k in range(listed(move)):
                third, last = move.place[k], move.expert[k]
                guest[third] = old
                tries -= 1
                now = judge_change(guest, home, third, half, other, scenarios, after)
                if now <= squares * LESS:
                    squares = now
                    outcome, after = after, outcome
                    hosts[last] -= 1
                    hosts[e] += 1
                    arrange(guest, home, forest)
                    break
                guest[third] = last
            if squares < before:
                break
            guest[r] = old
        if squares == before:
            break
        hopeful = False
    return squares


@borrowing
def _expect(
    guest: np.ndarray,
    home: np.ndarray,
    scenarios: Scenarios,
    outcome: Outcome,
    forest: Forest,
    need: np.ndarray,
    spare: np.ndarray,
) -> None:
    """How far room on a rank reaches, by the forest as it is.

    ``need`` [R, 32] tokens without room, of all that are lacking, that more room on a rank could end; ``spare`` [R, 32]
    room it could lose without harm. Of another guest it could take what it can.
    """
    num_ranks, trees, lacking = len(guest), forest.trees[0], load(outcome.lacking, 0)
    for i in range(trees, num_ranks):
        r = forest.order[i]
        store(need, r, zeros())
        store(spare, r, zeros())
    for turn in range(3):  # twice round the cycles, then down the trees
        first, last = (num_ranks - 1, trees) if turn < 2 else (trees - 1, 0)
        for i in range(first, last - 1, -1):
            r = forest.order[i]
            e = guest[r]
            can = load(outcome.can, r)
            needed, left = positive(zeros() - load(outcome.room, r)), can
            if e >= 0:
                over = load(outcome.taken, e) - load(scenarios.tokens, e)
                # at most what is lacking: need that goes round a cycle comes back
                needed = least(needed + least(positive(zeros() - over), load(need, home[e])), lacking)
                left = least(can, positive(over) + load(spare, home[e]))
            store(need, r, needed)
            store(spare, r, left)


@borrowing
def _hope(
    guest: np.ndarray,
    home: np.ndarray,
    scenarios: Scenarios,
    outcome: Outcome,
    forest: Forest,
    blocked: np.ndarray,
    need: np.ndarray,
    give: np.ndarray,
) -> None:
    """The same at best: all that lacks room may find it where something does, and what a rank can take is spare.

    Ranks that lack room, and those whose tokens come from them and could be more, are blocked, a minimum cut:
    ``blocked`` [R] says in which scenarios, bit by bit. They themselves have nothing to ``give`` [R, 32].
    """
    num_ranks, trees = len(guest), forest.trees[0]
    for r in range(num_ranks):
        blocked[r] = below(load(outcome.room, r), zeros())
    for turn in range(3):
        first, last = (num_ranks - 1, trees) if turn < 2 else (trees - 1, 0)
        for i in range(first, last - 1, -1):
            r = forest.order[i]
            e = guest[r]
            if e >= 0 and blocked[home[e]] != 0:
                blocked[r] |= blocked[home[e]] & below(load(outcome.taken, e), load(scenarios.tokens, e))
    lacking = load(outcome.lacking, 0)
    for r in range(num_ranks):
        store(need, r, kept(lacking, blocked[r]))
        store(give, r, kept(load(outcome.can, r), ~blocked[r]))


@borrowing
def _price(
    guest: np.ndarray,
    home: np.ndarray,
    scenarios: Scenarios,
    outcome: Outcome,
    spare: np.ndarray,
    loss: np.ndarray,
    price: np.ndarray,
) -> None:
    """What it would cost that a rank gives up its guest.

    ``loss`` [R, 32] tokens that could no longer be placed; ``price`` [R] what these add to the squares, infinite for
    ranks without guests.
    """
    lacking = load(outcome.lacking, 0)
    squares = squared(lacking)
    for r in range(len(guest)):
        e = guest[r]
        price[r] = np.inf
        if e >= 0:
            tokens, taken = load(scenarios.tokens, e), load(outcome.taken, e)
            left = least(tokens, taken - load(outcome.can, r))
            lost = positive(least(tokens, taken) - left - load(spare, home[e]))
            store(loss, r, lost)
            price[r] = squared(lacking + lost) - squares


@borrowing
def _candidates(
    guest: np.ndarray,
    home: np.ndarray,
    most: np.ndarray,
    hosts: np.ndarray,
    scenarios: Scenarios,
    outcome: Outcome,
    need: np.ndarray,
    give: np.ndarray,
    loss: np.ndarray,
    price: np.ndarray,
    worth: np.ndarray,
    expert: np.ndarray,
    cheap: np.ndarray,
    best: Shortlist,
) -> None:
    """Find swaps that give an expert of a rank in need to another rank, the most promising first: ``best``.

    Room to work in: ``expert`` [R], of each rank the one for which another host is worth most, or -1 before they are
    looked at; ``worth`` [R], keys of what that host takes off the squares if it takes all it can, before that at most;
    ``cheap``, up to R + 1 ranks that may be worth it: an estimate too, since price and worth do not simply add up.
    """
    lacking = load(outcome.lacking, 0)
    squares = squared(lacking)
    for r in range(len(guest)):
        worth[r] = key(squares - squared(lacking - load(need, r)), r)  # no expert of the rank is worth more
        expert[r] = -1
    empty(best, 0.0)
    left = max(EXPERTS, WIDE // len(guest))
    while left > 0:
        best_key = largest(worth)
        lender, most_worth = index_of(best_key), np.float64(value_of(best_key))
        if most_worth <= -best.cost[-1]:
            break
        worth[lender] = NONE  # once it is taken: the tokens of its other experts would be the same ones
        if expert[lender] < 0:
            its_most = 0
            for i in range(scenarios.first[lender], scenarios.first[lender + 1]):
                e = scenarios.experts[i]
                if hosts[e] < most[e]:
                    waiting = _waiting(e, load(need, lender), hosts, scenarios, outcome)
                    its_worth = squares - squared(lacking - waiting)
                    if its_worth > its_most:
                        its_most, expert[lender] = its_worth, e
                        worth[lender] = key(its_worth, lender)
            continue
        left -= 1
        e = expert[lender]
        waiting = _waiting(e, load(need, lender), hosts, scenarios, outcome)
        found, limit = 0, best.cost[-1] + most_worth
        for r in range(len(guest)):
            cheap[found] = r
            found += (price[r] < limit) & (guest[r] != e) & (r != lender)
        for i in range(found):
            r = cheap[i]
            if price[r] - most_worth < best.cost[-1]:
                lacks = load(loss, r) - least(load(give, r), waiting)
                offer(best, np.float64(squared(lacking + lacks) - squares), r, e)


@borrowing
def _waiting(expert: int, needed: np.ndarray, hosts: np.ndarray, scenarios: Scenarios, outcome: Outcome) -> np.ndarray:
    """Tokens of an expert that another host could take, at most ``needed`` [32]."""
    waiting = load(scenarios.tokens, expert)
    if hosts[expert] > 0:
        waiting = positive(waiting - load(outcome.taken, expert))
    return least(waiting, needed)


@borrowing
def _places(guest: np.ndarray, home: np.ndarray, price: np.ndarray, taken: int, expert: int, best: Shortlist) -> None:
    """``best``: ranks other than ``taken`` that could host ``expert`` instead of their guest, the cheapest first."""
    empty(best, np.inf)
    for r in range(len(guest)):
        if r != taken and guest[r] >= 0 and guest[r] != expert and home[expert] != r:
            offer(best, price[r], r, guest[r])
