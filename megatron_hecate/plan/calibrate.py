"""Tier 2: after the gate, with the true loads, correct the guests where that pays.

The loads are known now, so what blocks the largest rank load from falling is known exactly: a set of ranks whose tokens
cannot leave it (`flow.level`). A late guest opens a way out. It is fetched on the critical path, so it must win more
tokens than its fetch costs; doing nothing is the normal answer.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.late import Prices, busiest, search
from megatron_hecate.plan.materialize import plan_guests
from megatron_hecate.plan.placement import Placement
from megatron_hecate.plan.route import checked_total, largest_load
from megatron_hecate.plan.world import World

AGAIN: float = 2.0  # where all guests may be late, and more than so many copies' worth is left, all are planned again


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
    found = search(total, placement.home, prices, world.order, table, num_ranks, swaps, costs)
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
    return largest_load(total, plan, world) + busiest(plan.home, prices, expert, rank)
