"""Swapping guests until the forecast can flow: the step of `search` that looks at cuts.

Where the largest rank load stays above the mean, some set of ranks holds tokens that cannot leave it (a minimum cut).
Guests of other ranks make room for experts of this set, as long as that helps.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled
from megatron_hecate.plan.flow import NO_LIMIT, level
from megatron_hecate.plan.links import links_of, put
from megatron_hecate.plan.shortlist import Shortlist, listed, offer, shortlist

CANDIDATES: int = 16  # swaps tried for one blocked set, and experts looked at
GOAL: int = 128  # a hedged flow within 1/128 of the mean is balanced enough: the hedge is there to be spent
SPARE: int = 4  # guests that one expert may gain by swaps


@compiled
def unblock(
    forecast: np.ndarray,
    home: np.ndarray,
    table: np.ndarray,
    count: np.ndarray,
    where: np.ndarray,
    num_ranks: int,
    most: np.ndarray,
    hedge: int,
    tries: int,
) -> int:
    """Swap guests, in place, while the largest rank load of the hedged flow falls; at most ``tries`` swaps are tried.

    No expert gets more than ``most`` [E] guests, nor more than ``SPARE`` new ones, for which ``where`` has room;
    ``hedge``/256 of every even share stays where it is.

    Returns:
        The largest rank load of the final placement's hedged flow; 0, and nothing is done, when ``tries`` is below 0.
    """
    if tries < 0:
        return 0
    slots = len(table) // num_ranks
    served = np.zeros(len(table), np.int64)
    load = np.zeros(num_ranks, np.int64)
    least = np.zeros(len(forecast), np.int64)
    bound = np.empty(len(forecast), np.int64)  # holders an expert may have
    for e in range(len(forecast)):
        bound[e] = min(most[e] + 1, count[e] + SPARE)
        _split_evenly(forecast, count, where, served, load, least, e, hedge)
    even = load.copy()  # rank loads when every expert is split evenly
    mean = load.sum() // num_ranks
    goal = mean + mean // GOAL
    step = mean // 4096  # what a swap must win
    inside = np.empty(num_ranks, np.bool_)  # the blocked set
    links = links_of(table, count, where, num_ranks)
    best = level(links, table, served, load, least, goal, NO_LIMIT, inside)
    seen = np.empty(num_ranks, np.bool_)
    new_served, new_load = served.copy(), load.copy()
    improved = True
    while improved and best > goal and tries > 0:
        swap = _candidates(forecast, home, table, count, where, served, least, bound, even, inside, tries)
        improved = False
        for i in range(listed(swap)):
            tries -= 1
            slot, expert = swap.place[i], swap.expert[i]
            old = table[slot]
            new_served[:] = served
            new_load[:] = load
            _swap(forecast, table, count, where, new_served, new_load, least, slot, expert, hedge)
            # most swaps fail; that they do shows sooner when only a little less than `best` is asked for
            target = best - 1 - step
            links = links_of(table, count, where, num_ranks)
            cap = level(links, table, new_served, new_load, least, target, target, seen)
            if cap <= target:
                best = level(links, table, new_served, new_load, least, goal, NO_LIMIT, inside)
                served, new_served = new_served, served
                load, new_load = new_load, load
                improved = True
                even[:] = 0
                for c in range(len(table)):
                    if table[c] >= 0:
                        even[c // slots] += forecast[table[c]] // count[table[c]]
                break
            _swap(forecast, table, count, where, new_served, new_load, least, slot, old, hedge)
    return best


@borrowing
def _split_evenly(
    forecast: np.ndarray,
    count: np.ndarray,
    where: np.ndarray,
    served: np.ndarray,
    load: np.ndarray,
    least: np.ndarray,
    expert: int,
    hedge: int,
) -> None:
    """Every holder gets the same part, the first the remainder too; part of it has to stay."""
    n, slots = count[expert], len(served) // len(load)
    part = forecast[expert] // n
    for k in range(n):
        c = where[expert, k]
        served[c] = part if k else forecast[expert] - part * (n - 1)
        load[c // slots] += served[c]
    least[expert] = part * hedge // 256


@borrowing
def _swap(
    forecast: np.ndarray,
    table: np.ndarray,
    count: np.ndarray,
    where: np.ndarray,
    served: np.ndarray,
    load: np.ndarray,
    least: np.ndarray,
    slot: int,
    expert: int,
    hedge: int,
) -> None:
    """The guest in ``slot`` makes room for ``expert``; both are split evenly again."""
    old, slots = table[slot], len(table) // len(load)
    for e in (old, expert):
        for k in range(count[e]):
            load[where[e, k] // slots] -= served[where[e, k]]
    served[slot] = 0
    put(slot, expert, table, count, where)
    for e in (old, expert):
        _split_evenly(forecast, count, where, served, load, least, e, hedge)


@compiled
def _candidates(
    forecast: np.ndarray,
    home: np.ndarray,
    table: np.ndarray,
    count: np.ndarray,
    where: np.ndarray,
    served: np.ndarray,
    least: np.ndarray,
    bound: np.ndarray,
    even: np.ndarray,
    inside: np.ndarray,
    most: int,
) -> Shortlist:
    """Swaps that open a way out of the blocked set: a guest outside of it for an expert that has tokens to move inside.

    At most ``most``; those after which an even split would be most even (sum of squares of the rank loads) come first.
    """
    num_ranks = len(even)
    slots = len(table) // num_ranks
    mean = even.sum() // num_ranks
    above = (even - mean).astype(np.float64)
    # the experts with most tokens to move, and what the others of their holders gain by one more
    hot = shortlist(CANDIDATES, 0.0)
    for e in range(len(forecast)):
        if count[e] >= bound[e]:
            continue
        tokens = 0
        for k in range(count[e]):
            if inside[where[e, k] // slots]:
                tokens += served[where[e, k]] - least[e]
        offer(hot, -np.float64(tokens), -1, e)
    num_hot = listed(hot)
    parts, gains = np.empty(num_hot, np.float64), np.empty(num_hot, np.float64)
    for i in range(num_hot):
        e = hot.expert[i]
        parts[i] = forecast[e] // (count[e] + 1)
        less = forecast[e] // count[e] - parts[i]
        gains[i] = parts[i] * parts[i]
        for k in range(count[e]):
            gains[i] += less * (less - 2.0 * above[where[e, k] // slots])
    best = shortlist(min(CANDIDATES, most), np.inf)
    for c in range(len(table)):
        r, old = c // slots, table[c]
        if inside[r] or old < 0 or home[old] == r:
            continue
        n = count[old]
        part = forecast[old] // n
        more = forecast[old] // (n - 1) - part
        without = part * (part - 2.0 * above[r])
        for k in range(n):
            if where[old, k] != c:
                without += more * (2.0 * above[where[old, k] // slots] + more)
        for i in range(num_hot):
            score = without + 2.0 * parts[i] * above[r] + gains[i]
            if score >= best.cost[-1]:
                continue
            holds = False
            for other in range(r * slots, (r + 1) * slots):
                holds |= table[other] == hot.expert[i]
            if not holds:
                offer(best, score, c, hot.expert[i])
    return best
