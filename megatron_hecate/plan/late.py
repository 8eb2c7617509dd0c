"""The search for late guests: one after another, each the best of a few that are solved exactly."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled
from megatron_hecate.plan.flow import NO_LIMIT, level
from megatron_hecate.plan.links import holders, links_of, put, take_back
from megatron_hecate.plan.outlook import Outlook, above, hope, outlook
from megatron_hecate.plan.shortlist import Shortlist, listed, offer, shortlist

# Guests looked at for each late guest, the most promising first: as many as ranks may host it, within these bounds, and
# up to the second while none helps. With 8 on 32 ranks across nodes a jump leaves 1.27 where 24 leave 1.12.
TRIED: tuple[int, int] = (8, 24)
# What a token that the guest's rank itself has room for counts more than one that others may have room for. Largest
# load and price after 4,264 searches, jumps among them: 1.113 to 1.115 times the mean for 0.03 to 0.3.
SURE: float = 0.1


class Prices(NamedTuple):
    """What late guests cost, in tokens.

    Args:
        node: [R] the node of each rank.
        near: one from the same node.
        far: one from another node; infinite where there must be none.
    """

    node: np.ndarray
    near: float
    far: float


@compiled
def search(
    total: np.ndarray,
    home: np.ndarray,
    prices: Prices,
    order: np.ndarray,
    table: np.ndarray,
    num_ranks: int,
    swaps: np.ndarray,
    costs: np.ndarray,
) -> int:
    """One late guest after another, each the best of some, while the largest load or what exceeds the mean falls.

    Args:
        table: [R * P] changed in place.
        swaps: [most, 2] slot and expert of each late guest; filled in.
        costs: [most + 1] largest rank load and price of the busiest rank, before any and after each; filled in. Where
            the largest load is so near to the mean that none can pay, the first is what it is at most.

    Returns:
        How many late guests were found.
    """
    slots = len(table) // num_ranks
    count, where = holders(table, order, len(home), len(swaps))
    least = np.zeros(len(home), np.int64)
    served = np.zeros(len(table), np.int64)
    load = np.zeros(num_ranks, np.int64)
    for e in range(len(home)):
        for k in range(count[e]):
            if where[e, k] // slots == home[e]:
                served[where[e, k]] = total[e]
                load[home[e]] += total[e]
    mean = load.sum() // num_ranks
    received, sent, busy = np.zeros(num_ranks), np.zeros(num_ranks), 0.0
    inside = np.empty(num_ranks, np.bool_)
    links = links_of(table, count, where, num_ranks)
    fine = mean + np.int64(min(prices.near, prices.far, float(NO_LIMIT - mean)))  # nothing pays below
    cap = level(links, table, served, load, least, fine, fine, inside)
    if cap <= fine:
        costs[0] = cap
        return 0
    cap = level(links, table, served, load, least, 0, NO_LIMIT, inside, NO_LIMIT, True)
    costs[0] = cap
    tried = min(TRIED[1], max(TRIED[0], _hosts(prices)))
    late = np.zeros(len(table), np.bool_)
    movable = np.empty(len(home), np.int64)
    # what is tried, and the best of it
    new_served, new_load, new_inside = served.copy(), load.copy(), inside.copy()
    best_served, best_load, best_inside, best_cap = served.copy(), load.copy(), inside.copy(), cap
    for found in range(len(swaps)):
        if cap - mean <= min(prices.near, prices.far):
            return found
        ahead = outlook(links, served, load, inside, mean)
        _count(table, count, where, served, inside, movable)
        swap = _candidates(home, prices, table, movable, served, load, inside, late, received, sent, busy, ahead)
        best, best_busy, least_cost, least_above = -1, 0.0, cap + busy, np.inf
        for i in range(listed(swap)):
            if i >= tried and best >= 0:
                break
            slot, expert = swap.place[i], swap.expert[i]
            new_busy = _busy(prices, home[expert], slot // slots, received, sent, busy)
            largest, left = hope(ahead, slot // slots, movable[expert])
            hoped = min(cap + busy, largest + new_busy)
            if hoped > least_cost or (hoped == least_cost and left + new_busy >= least_above):
                continue
            enough = cap if least_cost == cap + busy else min(cap, np.int64(max(-1.0, least_cost - new_busy)))
            new_served[:] = served
            new_load[:] = load
            _send_home(slot, home, table, count, where, new_served, new_load)
            old, place = put(slot, expert, table, count, where)
            links = links_of(table, count, where, num_ranks)
            new_cap = level(links, table, new_served, new_load, least, 0, enough, new_inside, NO_LIMIT, True)
            take_back(slot, old, place, table, count, where)
            if new_cap > enough:
                continue
            new_excess = above(new_load, mean)
            if new_cap == cap and new_excess >= ahead.excess:
                continue
            cost, excess = min(cap + busy, new_cap + new_busy), new_excess + new_busy
            if cost < least_cost or (cost == least_cost and excess < least_above):
                best, best_busy, least_cost, least_above = i, new_busy, cost, excess
                best_served, new_served = new_served, best_served
                best_load, new_load = new_load, best_load
                best_inside, new_inside = new_inside, best_inside
                best_cap = new_cap
        if best < 0:
            return found
        slot, expert = swap.place[best], swap.expert[best]
        swaps[found, 0], swaps[found, 1] = slot, expert
        late[slot] = True
        rank, source = slot // slots, home[expert]
        price = _price(prices, source, rank)
        received[rank] += price
        sent[source] += price
        put(slot, expert, table, count, where)
        links = links_of(table, count, where, num_ranks)
        served, best_served = best_served, served
        load, best_load = best_load, load
        inside, best_inside = best_inside, inside
        cap, busy = best_cap, best_busy
        costs[found + 1] = cap + busy
    return len(swaps)


@compiled
def _hosts(prices: Prices) -> int:
    """Ranks among which late guests can be copied: all, or those of the largest node."""
    if prices.far < np.inf:
        return len(prices.node)
    ranks = np.zeros(len(prices.node), np.int64)
    for k in prices.node:
        ranks[k] += 1
    return ranks.max()


@borrowing
def _price(prices: Prices, source: int, rank: int) -> float:
    return prices.near if prices.node[source] == prices.node[rank] else prices.far


@borrowing
def _busy(prices: Prices, source: int, rank: int, received: np.ndarray, sent: np.ndarray, busy: float) -> float:
    """What the busiest rank receives or sends with one more late guest."""
    price = _price(prices, source, rank)
    return max(busy, received[rank] + price, sent[source] + price)


@compiled
def busiest(home: np.ndarray, prices: Prices, expert: np.ndarray, rank: np.ndarray) -> float:
    """Price of the late guests, ``expert`` on ``rank``, that the rank which has most of it receives or sends."""
    received, sent = np.zeros(len(prices.node)), np.zeros(len(prices.node))
    for i in range(len(expert)):
        price = _price(prices, home[expert[i]], rank[i])
        received[rank[i]] += price
        sent[home[expert[i]]] += price
    return max(received.max(), sent.max())


@borrowing
def _send_home(
    slot: int,
    home: np.ndarray,
    table: np.ndarray,
    count: np.ndarray,
    where: np.ndarray,
    served: np.ndarray,
    load: np.ndarray,
) -> None:
    """Tokens that a guest serves in ``slot``, if there is one, go back to its home."""
    slots, guest = len(table) // len(load), table[slot]
    if guest < 0:
        return
    for k in range(count[guest]):
        c = where[guest, k]
        if c // slots == home[guest]:
            served[c] += served[slot]
    load[home[guest]] += served[slot]
    load[slot // slots] -= served[slot]
    served[slot] = 0


@borrowing
def _count(
    table: np.ndarray,
    count: np.ndarray,
    where: np.ndarray,
    served: np.ndarray,
    inside: np.ndarray,
    movable: np.ndarray,
) -> None:
    """Tokens of each expert that the blocked set serves; ``movable`` [E] is filled in."""
    slots = len(table) // len(inside)
    for e in range(len(count)):
        movable[e] = 0
        for k in range(count[e]):
            if inside[where[e, k] // slots]:
                movable[e] += served[where[e, k]]


@compiled
def _candidates(
    home: np.ndarray,
    prices: Prices,
    table: np.ndarray,
    movable: np.ndarray,
    served: np.ndarray,
    load: np.ndarray,
    inside: np.ndarray,
    late: np.ndarray,
    received: np.ndarray,
    sent: np.ndarray,
    busy: float,
    ahead: Outlook,
) -> Shortlist:
    """Late guests that open a way out of the blocked set; first those that may leave least above the mean, and cost."""
    slots = len(table) // len(load)
    best = shortlist(TRIED[1], np.inf)
    for e in range(len(home)):
        if movable[e] == 0:
            continue
        for r in range(len(load)):
            if inside[r] or _price(prices, home[e], r) == np.inf:
                continue
            slot, held = -1, False
            for c in range(r * slots, (r + 1) * slots):
                held |= table[c] == e
                free = table[c] < 0 or (home[table[c]] != r and not late[c])
                # an empty slot, else that of the guest who serves least; neither serves less than an empty one
                if free and (slot < 0 or (table[slot] >= 0 and (table[c] < 0 or served[c] < served[slot]))):
                    slot = c
            if held or slot < 0:
                continue
            # the rank loses what its guest served and has that room, too
            sure = min(movable[e], ahead.mean - load[r] + served[slot]) - served[slot]
            _, left = hope(ahead, r, movable[e])
            offer(best, left + _busy(prices, home[e], r, received, sent, busy) - SURE * sure, slot, e)
    return best
