"""Local search: add replicas that let tokens leave overloaded ranks, one by one, while each pays.

After the gate the result is late replicas for the true loads; each must pay for a fetch on the
critical path. Before the gate the same search improves a plan for the forecast.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.cost import CopyCost
from megatron_hecate.plan.maxflow import Split, balance, compiled, rebalance
from megatron_hecate.plan.placement import Placement
from megatron_hecate.plan.world import World

# candidates that are solved exactly for each replica taken
TRIED: int = 8


def add_late_replicas(
    load: np.ndarray,
    placement: Placement,
    world: World,
    *,
    cost: CopyCost,
    max_copies: int,
    across_nodes: bool,
) -> Placement:
    """Add late replicas, or overwrite planned ones, as long as a fetch on the critical path pays.

    Args:
        load: [E] int, true tokens per expert in this microbatch, summed over all sources.
        placement: homes and replicas as planned. Any replica may be overwritten, because none has
            computed yet.
        world: node of every rank.
        cost: cost of one microbatch. No part of a late fetch hides, so ``hidden`` is ignored.
        max_copies: limit for late replicas on all ranks together.
        across_nodes: whether late replicas may be fetched from another node.

    Returns:
        The corrected placement, in which kept replicas keep their slots; ``placement`` itself if
        nothing pays.
    """
    routing = 0.0 if placement.num_replicas else cost.routing
    costs = np.array([cost.near, cost.far if across_nodes else np.inf, routing, cost.computing])
    limits = (max_copies, placement.slots_per_rank, placement.table.size, min(cost.near, costs[1]))
    tokens = np.ascontiguousarray(load, dtype=np.int64)
    table = overwrite(
        tokens, placement.home.copy(), placement.table.copy(), world.node_index, costs, limits
    )
    if np.array_equal(table, placement.table):
        return placement
    return Placement(placement.home, table)


@compiled
def overwrite(
    total: np.ndarray,
    home: np.ndarray,
    table: np.ndarray,
    node: np.ndarray,
    costs: np.ndarray,
    limits: tuple[int, int, int, float],
) -> np.ndarray:
    """Add replicas to a table, or overwrite its replicas, one by one; return the cheapest table.

    Each step takes the expert and rank that minimize the largest load plus the busiest rank's
    copies, among the `TRIED` pairs that move most tokens out of the closed set (`maxflow`).

    Args:
        total: [E] tokens.
        home: [E] home ranks.
        table: [R, P] experts; not modified.
        node: [R] nodes.
        costs: tokens per copy inside a node, tokens per copy between nodes, the fixed cost of
            having replicas, and that of each one more on the rank with most.
        limits: replicas placed here, replicas per rank, replicas of one rank's home experts, and
            tokens above the mean that need no further replica.

    Returns:
        [R, P] experts.
    """
    limit, per_rank, leaving, slack = limits
    num_ranks = len(table)
    grid = table.copy()
    best = table
    received = np.zeros(num_ranks)
    sends = np.zeros(num_ranks)
    busy = 0.0
    late = np.zeros(table.shape, np.bool_)
    mean = total.sum() // num_ranks
    cheapest = np.inf
    split = balance(total, grid, 0, True)
    remote, copies = _replicas(grid, home)
    for step in range(limit + 1):
        largest = max(split.load)
        fixed = costs[3] * max(copies)
        cost = largest + fixed + (busy + costs[2] if step > 0 else 0.0)
        if cost < cheapest:
            cheapest = cost
            best = grid.copy()
        if step == limit or largest - mean <= slack:
            break
        slot, freed = _free_slots(grid, home, late, _served(split, grid), per_rank)
        excess = np.maximum(split.load - mean, 0).sum()
        choice = -1
        lowest = (np.inf, 0)
        best_split = split
        for place in _most_relief(
            split, grid, (home, node, slot, freed), remote < leaving, (mean, costs[1] < np.inf)
        ):
            e, r = place // num_ranks, place % num_ranks
            copying = costs[1] if node[r] != node[home[e]] else costs[0]
            tried = rebalance(split, e, r, grid[r, slot[r]])
            above = np.maximum(tried.load - mean, 0).sum()
            cost = (
                max(tried.load)
                + max(busy, received[r] + copying, sends[home[e]] + copying)
                + max(fixed, costs[3] * (copies[r] + (grid[r, slot[r]] < 0)))
            )
            # If several ranks share the largest load, one replica cannot lower it; fewer tokens
            # above the mean are progress as well.
            if (max(tried.load) < largest or above < excess) and (cost, above) < lowest:
                choice = place
                lowest = (cost, above)
                best_split = tried
        if choice < 0:
            break
        e, r = choice // num_ranks, choice % num_ranks
        split = best_split
        copying = costs[1] if node[r] != node[home[e]] else costs[0]
        old = grid[r, slot[r]]
        if old >= 0:
            remote[home[old]] -= 1
        copies[r] += old < 0
        remote[home[e]] += 1
        grid[r, slot[r]], late[r, slot[r]] = e, True
        received[r] += copying
        sends[home[e]] += copying
        busy = max(busy, received[r], sends[home[e]])
    return best


@compiled
def _replicas(table: np.ndarray, home: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count the replicas of each rank's home experts, and those that it holds: [R] int64 both."""
    remote = np.zeros(len(table), np.int64)
    copies = np.zeros(len(table), np.int64)
    for r in range(len(table)):
        for e in table[r]:
            if e >= 0 and home[e] != r:
                remote[home[e]] += 1
                copies[r] += 1
    return remote, copies


@compiled
def _served(split: Split, table: np.ndarray) -> np.ndarray:
    """Look up the tokens that each slot of ``table`` serves: [R, P] int64, 0 for empty slots."""
    served = np.zeros(table.shape, np.int64)
    for r in range(len(table)):
        for c in range(table.shape[1]):
            e = table[r, c]
            # an empty slot (-1) has the empty range from begin[0] to begin[0]
            for i in range(split.begin[max(e, 0)], split.begin[e + 1]):
                if split.rank[i] == r:
                    served[r, c] = split.share[i]
    return served


@compiled
def _most_relief(
    split: Split,
    table: np.ndarray,
    where: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    sends: np.ndarray,
    may: tuple[int, bool],
) -> np.ndarray:
    """Find the `TRIED` new replicas that can take most tokens out of the closed set.

    Args:
        split: split of the tokens over the holders in ``table``; its ``blocked`` is the closed set.
        table: [R, P] experts.
        where: [E] homes, [R] nodes, [R] the slot to overwrite or -1, [R] tokens served there.
        sends: [R] whether the rank may send one more copy.
        may: tokens per rank, and whether replicas may be fetched from another node.

    Returns:
        [at most TRIED] int64 replicas as expert * R + rank, most tokens first.
    """
    mean, across_nodes = may
    home, node, slot, freed = where
    num_ranks = len(table)
    count = 0
    place = np.empty(TRIED, np.int64)
    gains = np.empty(TRIED, np.int64)
    for e in range(len(home)):
        # tokens of the expert inside the closed set
        inside = 0
        if not sends[home[e]]:
            continue
        for i in range(split.begin[e], split.begin[e + 1]):
            if split.blocked[split.rank[i]]:
                inside += split.share[i]
        if inside == 0:
            continue
        for r in range(num_ranks):
            if split.blocked[r] or slot[r] < 0 or (node[r] != node[home[e]] and not across_nodes):
                continue
            # the tokens of the overwritten replica return to its other holders
            gain = min(inside, mean - split.load[r] + freed[r]) - freed[r]
            if gain <= (0 if count < TRIED else gains[TRIED - 1]) or e in table[r]:
                continue
            # insertion into the list, sorted by descending gain
            count = min(count + 1, TRIED)
            index = count - 1
            while index > 0 and gains[index - 1] < gain:
                gains[index] = gains[index - 1]
                place[index] = place[index - 1]
                index -= 1
            gains[index] = gain
            place[index] = e * num_ranks + r
    return place[:count]


@compiled
def _free_slots(
    table: np.ndarray, home: np.ndarray, late: np.ndarray, served: np.ndarray, per_rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the slot of each rank for its next replica: an empty one, or the least used replica's.

    Args:
        table: [R, P] experts.
        home: [E] home ranks.
        late: [R, P] bool, slots filled by this search, which keep their replica.
        served: [R, P] tokens.
        per_rank: limit for replicas of a rank.

    Returns:
        [R] the slot, or -1 if none is usable; [R] tokens served there now.
    """
    slot = np.full(len(table), -1)
    freed = np.zeros(len(table), np.int64)
    for r in range(len(table)):
        replicas = 0
        for c in range(table.shape[1]):
            if table[r, c] >= 0 and home[table[r, c]] != r:
                replicas += 1
        for c in range(table.shape[1]):
            e = table[r, c]
            # an empty slot is preferred to any replica, also to one without tokens
            if e < 0:
                usable = replicas < per_rank
                tokens = -1
            else:
                usable = home[e] != r and not late[r, c]
                tokens = served[r, c]
            if usable and (slot[r] < 0 or tokens < freed[r]):
                slot[r] = c
                freed[r] = tokens
        freed[r] = max(freed[r], 0)
    return slot, freed
