"""Replicas that open a way out of the ranks whose tokens cannot leave them: one after another, as far as each pays.

After the gate they are late replicas, for the true loads, and a fetch on the critical path must pay. Before the gate
the same search improves a plan for the forecast.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.cost import CopyCost
from megatron_hecate.plan.maxflow import Split, balance, compiled, rebalance
from megatron_hecate.plan.placement import Placement
from megatron_hecate.plan.world import World

TRIED: int = 8  # replicas that are solved exactly for each one taken


def add_late_replicas(
    load: np.ndarray,
    placement: Placement,
    world: World,
    *,
    cost: CopyCost,
    most: int,
    across_nodes: bool,
) -> Placement:
    """Add replicas, or overwrite some, as far as fetching them now pays.

    Args:
        load: [E] int, true tokens per expert in this microbatch, summed over all sources.
        placement: homes and replicas as planned. Any replica may be overwritten: none has computed yet.
        world: node of every rank.
        cost: of one microbatch; nothing of a late fetch hides, so its ``hidden`` does not count.
        most: late replicas on all ranks together, at most.
        across_nodes: whether they may come from another node.

    Returns:
        The corrected placement, in which replicas that stay keep their slots; ``placement`` itself when nothing pays.

    Loads that do not fit, a negative limit or a world of other ranks are ValueErrors.
    """
    load = placement.checked_load(load)
    if world.num_ranks != placement.num_ranks:
        raise ValueError(f"world has {world.num_ranks} ranks, the placement {placement.num_ranks}")
    if most < 0:
        raise ValueError(f"most={most} must be 0 or more")
    routing = 0.0 if placement.num_replicas else cost.routing
    costs = np.array([cost.near, cost.far if across_nodes else np.inf, routing])
    limits = (most, placement.slots_per_rank, placement.table.size, min(cost.near, costs[1]))
    table = overwrite(
        load, placement.home.copy(), placement.table.copy(), world.node_index, costs, limits
    )
    return (
        placement
        if np.array_equal(table, placement.table)
        else Placement.trusted(placement.home, table)
    )


@compiled
def overwrite(
    total: np.ndarray,
    home: np.ndarray,
    table: np.ndarray,
    node: np.ndarray,
    costs: np.ndarray,
    limits: tuple[int, int, int, float],
) -> np.ndarray:
    """The best table [R, P] found when replicas are added to ``table``, or overwrite others, one after another.

    Each is the expert and the rank that leave the smallest largest load plus what the busiest rank pays, of the `TRIED`
    pairs that move most tokens out of the ranks whose tokens cannot leave them (`maxflow`).

    Args:
        total: [E] tokens.
        home: [E] ranks.
        node: [R] nodes.
        costs: tokens that one copy costs inside a node and between nodes, and that having replicas at all costs.
        limits: replicas that are placed here, replicas of a rank, replicas of one rank's experts, and tokens above the
            mean that are good enough.
    """
    most, per_rank, leaving, enough = limits
    now, best = table.copy(), table
    received, sent, busy = np.zeros(len(table)), np.zeros(len(table)), 0.0
    late, mean, least = np.zeros(table.shape, np.bool_), total.sum() // len(table), np.inf
    split, away = balance(total, now, 0, True), np.zeros(len(table), np.int64)
    for r in range(len(table)):
        for e in now[r]:
            away[home[e]] += 1 if e >= 0 and home[e] != r else 0
    for step in range(most + 1):
        largest = max(split.load)
        cost = largest + (busy + costs[2] if step > 0 else 0.0)
        if cost < least:
            least, best = cost, now.copy()
        if step == most or largest - mean <= enough:
            break
        slot, back = _free_slots(now, home, late, _served(split, now), per_rank)
        excess = np.maximum(split.load - mean, 0).sum()
        choice, lowest, chosen = -1, (np.inf, 0), split
        for place in _most_relief(
            split, now, (home, node, slot, back), away < leaving, (mean, costs[1] < np.inf)
        ):
            e, r = place // len(table), place % len(table)
            copying = costs[1] if node[r] != node[home[e]] else costs[0]
            its = rebalance(split, e, r, now[r, slot[r]])
            above = np.maximum(its.load - mean, 0).sum()
            cost = max(its.load) + max(busy, received[r] + copying, sent[home[e]] + copying)
            # fewer tokens above the mean are progress, too, where several ranks share the largest load
            if (max(its.load) < largest or above < excess) and (cost, above) < lowest:
                choice, lowest, chosen = place, (cost, above), its
        if choice < 0:
            break
        e, r, split = choice // len(table), choice % len(table), chosen
        copying = costs[1] if node[r] != node[home[e]] else costs[0]
        old = now[r, slot[r]]
        away[home[max(old, 0)]] -= 1 if old >= 0 else 0
        away[home[e]] += 1
        now[r, slot[r]], late[r, slot[r]] = e, True
        received[r] += copying
        sent[home[e]] += copying
        busy = max(busy, received[r], sent[home[e]])
    return best


@compiled
def _served(split: Split, table: np.ndarray) -> np.ndarray:
    """[R, P] tokens that each slot of ``table`` serves."""
    served = np.zeros(table.shape, np.int64)
    for r in range(len(table)):
        for c in range(table.shape[1]):
            e = table[r, c]
            for i in range(split.begin[max(e, 0)], split.begin[e + 1]):
                served[r, c] = split.share[i] if split.rank[i] == r else served[r, c]
    return served


@compiled
def _most_relief(
    split: Split,
    table: np.ndarray,
    where: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    sends: np.ndarray,
    may: tuple[int, bool],
) -> np.ndarray:
    """The `TRIED` new replicas, as expert * R + rank, that can take most tokens off the ranks whose tokens are stuck.

    Args:
        split: of the tokens over the holders in ``table``.
        table: [R, P] experts.
        where: [E] homes, [R] nodes, [R] the slot to overwrite or -1, [R] tokens that it serves.
        sends: [R] whether the rank may send one more copy.
        may: tokens of a rank, and whether replicas may come from another node.
    """
    mean, across_nodes = may
    home, node, slot, back = where
    num_ranks, found = len(table), 0
    place, gains = np.empty(TRIED, np.int64), np.empty(TRIED, np.int64)
    for e in range(len(home)):
        inside = 0  # tokens that cannot leave
        if not sends[home[e]]:
            continue
        for i in range(split.begin[e], split.begin[e + 1]):
            inside += split.share[i] if split.blocked[split.rank[i]] else 0
        for r in range(num_ranks if inside > 0 else 0):
            if split.blocked[r] or slot[r] < 0 or (node[r] != node[home[e]] and not across_nodes):
                continue
            gain = min(inside, mean - split.load[r] + back[r]) - back[r]
            if gain <= (0 if found < TRIED else gains[TRIED - 1]) or e in table[r]:
                continue
            found = min(found + 1, TRIED)
            at = found - 1
            while at > 0 and gains[at - 1] < gain:
                gains[at], place[at] = gains[at - 1], place[at - 1]
                at -= 1
            gains[at], place[at] = gain, e * num_ranks + r
    return place[:found]


@compiled
def _free_slots(
    table: np.ndarray, home: np.ndarray, late: np.ndarray, served: np.ndarray, per_rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """[R] the slot of each rank to use, empty or of the replica that serves least, or -1; [R] tokens served there.

    ``late`` [R, P] slots stay as they are; ``served`` [R, P] are tokens.
    """
    slot, back = np.full(len(table), -1), np.zeros(len(table), np.int64)
    for r in range(len(table)):
        replicas = 0
        for c in range(table.shape[1]):
            replicas += 1 if table[r, c] >= 0 and home[table[r, c]] != r else 0
        for c in range(table.shape[1]):
            e = table[r, c]
            usable = replicas < per_rank if e < 0 else home[e] != r and not late[r, c]
            its = served[r, c] if e >= 0 else -1  # an empty slot serves less than any replica
            if usable and (slot[r] < 0 or its < back[r]):
                slot[r], back[r] = c, its
        back[r] = max(back[r], 0)
    return slot, back
