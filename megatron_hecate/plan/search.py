"""Where guests go, so that tokens can flow: the compiled core of our planner.

A placement is judged by what the quotas can do with it later, under loads that differ from the forecast. So a plan is
made in three steps:

1. `apportion.share_out`: slots go to experts by load per holder.
2. `fill`: the copies, largest share first, go to the ranks of least load.
3. `swap.unblock`: let the forecast's tokens flow, but keep part of each holder's even share where it is. That is the
   hedge: a holder that serves some tokens of an expert, and not all it could, can take more and give back when the
   forecast is off. Where the largest rank load stays above the mean, swap guests until it falls.

Arrays are those of `flow`. Forecasts are integers whose sum is about ``SCALE``.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.apportion import share_out
from megatron_hecate.plan.compiled import borrowing, compiled
from megatron_hecate.plan.links import holders
from megatron_hecate.plan.sort import INDEX, in_order
from megatron_hecate.plan.swap import SPARE, unblock

SCALE: int = 1 << 30  # tells any two loads apart; sums of products stay below 2^63
# Part of an even share that stays in place, in 1/256. 80 to 128 leave least imbalance on the traces in bench/data.
HEDGE: int = 96
SHUFFLE: int = 648_113  # odd, so index * SHUFFLE % INDEX tells indices apart
UNSHUFFLE: int = pow(SHUFFLE, -1, INDEX)
SHIFT: int = 5  # ranks, from round to round


@compiled
def scale(forecast: np.ndarray, home: np.ndarray, num_ranks: int) -> tuple[np.ndarray, float, int]:
    """A forecast as integers.

    Args:
        forecast: [E] float.
        home: [E].
        num_ranks: R.

    Returns:
        scaled: [E] integers whose sum is about ``SCALE``, or 0.
        total: sum of the forecast; -1 if it has NaN, infinite or negative entries.
        largest: largest rank load of ``scaled`` when all is computed at home.
    """
    scaled, load = np.zeros(len(forecast), np.int64), np.zeros(num_ranks, np.int64)
    peak = 0.0
    for tokens in forecast:
        if not 0.0 <= tokens < np.inf:
            return scaled, -1.0, 0
        peak = max(peak, tokens)
    if peak == 0.0:
        return scaled, 0.0, 0
    shares = 0.0  # the sum itself may be beyond a double
    for tokens in forecast:
        shares += tokens / peak
    for e in range(len(forecast)):
        scaled[e] = np.int64(np.rint(forecast[e] / peak / shares * SCALE))
        load[home[e]] += scaled[e]
    return scaled, shares * peak, load.max()


@compiled
def spread(
    forecast: np.ndarray, home: np.ndarray, bare: np.ndarray, allowed: np.ndarray, copies: int, most: np.ndarray
) -> np.ndarray:
    """[R * P] the table with guests shared out and filled in.

    Args:
        forecast: [E] tokens expected.
        home: [E].
        bare: [R, P] the table without guests.
        allowed: [R] guests a rank may host.
        copies: guests in all.
        most: [E] guests an expert may have.
    """
    table, free = bare.ravel().copy(), allowed.copy()
    fill(forecast, share_out(forecast, most, copies), home, table, free)
    left = copies - (allowed.sum() - free.sum())
    if left > 0 and free.sum() > 0:  # the hottest experts are on all ranks that had room
        given, load = np.full(len(home), -1, np.int64), np.zeros(len(free), np.int64)
        for e in table:
            given[e] += e >= 0
        for c in range(len(table)):
            if table[c] >= 0:
                load[c // bare.shape[1]] += forecast[table[c]] // (given[table[c]] + 1)
        top_up(forecast, given, most, table, free, load, left)
    return table


@compiled
def plan(
    forecast: np.ndarray,
    home: np.ndarray,
    bare: np.ndarray,
    order: np.ndarray,
    allowed: np.ndarray,
    copies: int,
    most: np.ndarray,
    hedge: int,
    tries: int,
) -> tuple[np.ndarray, int]:
    """Place guests. Args as of `spread`, the ``order`` [R] of the ranks by node, and those of `unblock`.

    Returns:
        table: [R * P] with guests.
        largest: the largest rank load of its hedged flow.
    """
    table = spread(forecast, home, bare, allowed, copies, most)
    count, where = holders(table, order, len(home), SPARE)
    largest = unblock(forecast, home, table, count, where, len(order), most, hedge, tries)
    return table, largest


@compiled
def fill(forecast: np.ndarray, given: np.ndarray, home: np.ndarray, table: np.ndarray, free: np.ndarray) -> None:
    """Put ``given`` [E] copies into empty slots, in place; ``free`` [R] counts those a rank may still fill.

    The largest shares go to the ranks that have least when every expert is split evenly, one guest per rank and round.
    Ranks of equal load come shuffled, in every round otherwise: in order, neighbours would host each other's experts
    and tokens go no farther.
    """
    num_ranks, num_experts = len(free), len(forecast)
    slots = len(table) // num_ranks
    share = np.empty(num_experts, np.int64)
    load = np.zeros(num_ranks, np.int64)
    copied = np.empty(num_experts, np.int64)
    found, wanted = 0, 0
    for e in range(num_experts):
        share[e] = forecast[e] // (given[e] + 1)
        load[home[e]] += share[e]
        if given[e] > 0:
            copied[found] = (SCALE * 2 - share[e]) * INDEX + e
            found += 1
            wanted += given[e]
    copies = np.empty(wanted, np.int64)
    i = 0
    for key in in_order(copied[:found]):
        e = key % INDEX
        copies[i : i + given[e]] = e
        i += given[e]
    ranks = np.empty(num_ranks, np.int64)
    first = 0  # copies before this one are placed
    placed, shift = True, 0
    while placed and first < wanted:
        placed = False
        for r in range(num_ranks):
            ranks[r] = load[r] * INDEX + (r + shift) * SHUFFLE % INDEX
        for key in in_order(ranks):
            r = key % INDEX * UNSHUFFLE % INDEX - shift
            if free[r] == 0:
                continue
            for i in range(first, wanted):
                e = copies[i]
                if e < 0:
                    continue
                empty, holds = -1, False
                for c in range(r * slots, (r + 1) * slots):
                    holds |= table[c] == e
                    if table[c] < 0 and empty < 0:
                        empty = c
                if not holds:
                    table[empty] = e
                    load[r] += share[e]
                    free[r] -= 1
                    copies[i] = -1
                    placed = True
                    break
            while first < wanted and copies[first] < 0:
                first += 1
        shift += SHIFT


@compiled
def top_up(
    forecast: np.ndarray,
    given: np.ndarray,
    most: np.ndarray,
    table: np.ndarray,
    free: np.ndarray,
    load: np.ndarray,
    copies: int,
) -> None:
    """Put up to ``copies`` more into empty slots, in place: experts by load per holder, to the ranks of least load.

    ``given`` [E] counts the guests of each expert so far; those whose ranks are taken are passed over.
    """
    slots = len(table) // len(free)
    placed = np.zeros(len(forecast), np.bool_)  # on all ranks that have room, now and hence
    while copies > 0:
        expert = -1
        for e in range(len(forecast)):
            if forecast[e] == 0 or given[e] >= most[e] or placed[e]:
                continue
            if expert < 0 or forecast[e] * (given[expert] + 1) > forecast[expert] * (given[e] + 1):
                expert = e
        if expert < 0:
            return
        rank = _least_loaded(table, free, load, slots, expert)
        if rank < 0:
            placed[expert] = True
            continue
        table[empty_slot(table, slots, rank, expert)] = expert
        given[expert] += 1
        free[rank] -= 1
        load[rank] += forecast[expert] // (given[expert] + 1)
        copies -= 1


@borrowing
def _least_loaded(table: np.ndarray, free: np.ndarray, load: np.ndarray, slots: int, expert: int) -> int:
    """The rank of least load that can host ``expert``, or -1."""
    rank = -1
    for r in range(len(free)):
        if free[r] > 0 and (rank < 0 or load[r] < load[rank]) and empty_slot(table, slots, r, expert) >= 0:
            rank = r
    return rank


@borrowing
def empty_slot(table: np.ndarray, slots: int, rank: int, expert: int) -> int:
    """An empty slot of ``rank``; -1 if there is none or it holds ``expert``."""
    empty = -1
    for c in range(rank * slots, (rank + 1) * slots):
        if table[c] == expert:
            return -1
        if table[c] < 0 and empty < 0:
            empty = c
    return empty
