"""Tier 2: after the gate, with the true loads, correct the guests where that pays.

The loads are known now, so what blocks the largest rank load from falling is known exactly: a set of ranks whose tokens
cannot leave it (`flow.level`). A late guest opens a way out. It is fetched on the critical path, so it must win more
tokens than its fetch costs; doing nothing is the normal answer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled
from megatron_hecate.plan.flow import NO_LIMIT, level
from megatron_hecate.plan.links import holders, links_of, put, take_back
from megatron_hecate.plan.materialize import plan_guests
from megatron_hecate.plan.placement import Placement
from megatron_hecate.plan.route import checked_total, largest_load
from megatron_hecate.plan.shortlist import Shortlist, listed, offer, shortlist
from megatron_hecate.plan.world import World

AGAIN: float = 2.0  # where all guests may be late, and more than so many copies' worth is left, all are planned again
TRIED: int = 24  # swaps solved exactly for each late guest, the most promising first


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


def calibrate(
    total: np.ndarray,
    placement: Placement,
    world: World,
    *,
    copy_tokens: float,
    most_late: int,
    routing_tokens: float = 0.0,
    across_tokens: float | None = None,
) -> Placement:
    """Add guests, or overwrite some, as far as the late fetch pays.

    One late guest after another, or, where that leaves much and all may be late, all planned again: whatever minimizes

        largest rank load + price of the late guests that the busiest rank receives or sends
        (+ ``routing_tokens`` where there were no guests)

    with at most ``most_late`` of them.

    Args:
        total: [E] int, true tokens per expert in this microbatch, summed over all sources.
        placement: homes and guests of tier 1. Any guest may be overwritten: none has computed yet.
        world: node of every rank.
        copy_tokens: the price of one late guest inside a node: tokens the slowest rank must be spared for its fetch to
            pay (`LayerShape.copy_tokens`).
        most_late: late guests of this layer on all ranks together, at most.
        routing_tokens: what routing to guests costs when there are none yet (`LayerShape.routing_tokens`).
        across_tokens: the price of one late guest from another node; ``None`` is never.

    Returns:
        The corrected placement; ``placement`` itself when nothing pays.

    Raises:
        ValueError: for loads of the wrong length, negative or not integral, a price or limit below 0, and a world that
            does not fit.
    """
    total = checked_total(total, placement, world)
    far = np.inf if across_tokens is None else across_tokens
    if not (copy_tokens >= 0 and far >= 0 and routing_tokens >= 0) or most_late < 0:
        raise ValueError(f"{copy_tokens=}, {across_tokens=}, {routing_tokens=} and {most_late=} must be 0 or more")
    if placement.num_guests:
        routing_tokens = 0.0  # paid already
    num_ranks = placement.num_ranks
    most_late = min(most_late, placement.table.size)
    table = placement.table.ravel().copy()
    swaps = np.empty((most_late, 2), np.int64)
    costs = np.empty(most_late + 1)
    prices = Prices(world.node_index, float(copy_tokens), float(far))
    found = _search(total, placement.home, prices, world.order, table, num_ranks, swaps, costs)
    costs[1:] += routing_tokens
    best = int(np.argmin(costs[: found + 1]))
    best_cost = float(costs[best])
    all_can_be_late = placement.table.size - placement.num_experts <= most_late
    if all_can_be_late and best_cost - total.sum() / num_ranks > AGAIN * copy_tokens + routing_tokens:
        again = plan_guests(total, placement, world)
        cost = _cost(again, placement, total, world, prices, most_late=most_late)
        if cost + routing_tokens < best_cost:
            return again
    if not best:
        return placement
    table = placement.table.copy()
    for slot, expert in swaps[:best]:
        table.flat[slot] = expert
    return Placement.trusted(placement.home, table)


def _cost(
    plan: Placement,
    before: Placement,
    total: np.ndarray,
    world: World,
    prices: Prices,
    *,
    most_late: int,
) -> float:
    """What `calibrate` minimizes, but for routing, of any plan; infinite when it breaks a limit or adds nothing."""
    expert, rank = np.nonzero(plan.holders & ~before.holders)
    if not len(expert) or len(expert) > most_late:
        return float("inf")
    return largest_load(total, plan, world) + _busiest(plan.home, prices, expert, rank)


@compiled
def _search(
    total: np.ndarray,
    home: np.ndarray,
    prices: Prices,
    order: np.ndarray,
    table: np.ndarray,
    num_ranks: int,
    swaps: np.ndarray,
    costs: np.ndarray,
) -> int:
    """One late guest after another, each the best of `TRIED`, while the largest load or what exceeds the mean falls.

    Args:
        table: [R * P] changed in place.
        swaps: [most, 2] slot and expert of each late guest; filled in.
        costs: [most + 1] largest rank load and price of the busiest rank, before any and after each; filled in.

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
    received, sent, busiest = np.zeros(num_ranks), np.zeros(num_ranks), 0.0
    inside = np.empty(num_ranks, np.bool_)
    seen = np.empty(num_ranks, np.bool_)
    links = links_of(table, count, where, num_ranks)
    cap = level(links, table, served, load, least, 0, NO_LIMIT, inside, NO_LIMIT, True)
    excess = _above(load, mean)
    costs[0] = cap
    late = np.zeros(len(table), np.bool_)
    new_served, new_load = served.copy(), load.copy()
    for found in range(len(swaps)):
        if cap - mean <= min(prices.near, prices.far):
            return found
        swap = _candidates(home, prices, table, count, where, served, load, inside, mean, late)
        best, paid, least_cost, least_above = -1, 0.0, cap + busiest, np.inf
        for i in range(listed(swap)):
            slot, expert = swap.place[i], swap.expert[i]
            rank, source = slot // slots, home[expert]
            price = _price(prices, source, rank)
            new_busiest = max(busiest, received[rank] + price, sent[source] + price)
            enough = cap if least_cost == cap + busiest else min(cap, np.int64(max(-1.0, least_cost - new_busiest)))
            new_served[:] = served
            new_load[:] = load
            _send_home(slot, home, table, count, where, new_served, new_load)
            old, place = put(slot, expert, table, count, where)
            links = links_of(table, count, where, num_ranks)
            new_cap = level(links, table, new_served, new_load, least, 0, enough, seen, NO_LIMIT, True)
            take_back(slot, old, place, table, count, where)
            if new_cap > enough:
                continue
            new_excess = _above(new_load, mean)
            if new_cap == cap and new_excess >= excess:
                continue
            cost, above = min(cap + busiest, new_cap + new_busiest), new_excess + new_busiest
            if cost < least_cost or (cost == least_cost and above < least_above):
                best, paid, least_cost, least_above = i, price, cost, above
        if best < 0:
            return found
        slot, expert = swap.place[best], swap.expert[best]
        swaps[found, 0], swaps[found, 1] = slot, expert
        late[slot] = True
        rank, source = slot // slots, home[expert]
        received[rank] += paid
        sent[source] += paid
        busiest = max(busiest, received[rank], sent[source])
        _send_home(slot, home, table, count, where, served, load)
        put(slot, expert, table, count, where)
        links = links_of(table, count, where, num_ranks)
        cap = level(links, table, served, load, least, 0, NO_LIMIT, inside, NO_LIMIT, True)
        excess = _above(load, mean)
        costs[found + 1] = cap + busiest
    return len(swaps)


@borrowing
def _price(prices: Prices, source: int, rank: int) -> float:
    return prices.near if prices.node[source] == prices.node[rank] else prices.far


@compiled
def _busiest(home: np.ndarray, prices: Prices, expert: np.ndarray, rank: np.ndarray) -> float:
    """Price of the late guests, ``expert`` on ``rank``, that the rank which has most of it receives or sends."""
    received, sent = np.zeros(len(prices.node)), np.zeros(len(prices.node))
    for i in range(len(expert)):
        price = _price(prices, home[expert[i]], rank[i])
        received[rank[i]] += price
        sent[home[expert[i]]] += price
    return max(received.max(), sent.max())


@borrowing
def _above(load: np.ndarray, mean: int) -> int:
    """Tokens above the mean, over all ranks."""
    excess = 0
    for tokens in load:
        excess += max(0, tokens - mean)
    return excess


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


@compiled
def _candidates(
    home: np.ndarray,
    prices: Prices,
    table: np.ndarray,
    count: np.ndarray,
    where: np.ndarray,
    served: np.ndarray,
    load: np.ndarray,
    inside: np.ndarray,
    mean: int,
    late: np.ndarray,
) -> Shortlist:
    """Late guests that open a way out of the blocked set; first those that can take most from it, less their price."""
    num_ranks = len(load)
    slots = len(table) // num_ranks
    best = shortlist(TRIED, np.inf)
    for e in range(len(home)):
        movable = 0
        for k in range(count[e]):
            if inside[where[e, k] // slots]:
                movable += served[where[e, k]]
        if movable == 0:
            continue
        for r in range(num_ranks):
            price = _price(prices, home[e], r)
            if inside[r] or price == np.inf:
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
            won = min(movable, mean - load[r] + served[slot]) - served[slot]
            offer(best, price - won, slot, e)
    return best
