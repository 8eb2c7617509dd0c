"""Where tokens start, and the split that is nearest to that when nobody counts ranks' loads.

The loads of all sources are read once, row by row: at a thousand ranks that alone is most of the time a split takes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled
from megatron_hecate.plan.graph import Graph


class Origin(NamedTuple):
    """Sums of loads over sources.

    Args:
        total: [E] tokens for each expert.
        own: [R * P] tokens for a slot's expert that start on its rank.
        near: [G] tokens for a group's expert that start on its node.
    """

    total: np.ndarray
    own: np.ndarray
    near: np.ndarray


@compiled
def origins(load: np.ndarray, source: np.ndarray, graph: Graph, row: int) -> tuple[Origin, Origin, bool]:
    """Sum up loads.

    Args:
        load: [N, E] tokens of each source for each expert.
        source: [N] rank of each source.
        row: a source.

    Returns:
        all: over all sources.
        before: over the sources before ``row``.
        negative: whether any load is below 0.
    """
    num_sources, num_experts = load.shape
    num_ranks, num_slots = len(graph.node), len(graph.table)
    slots, num_groups = num_slots // num_ranks, len(graph.group_begin)
    total, total_before = np.zeros(num_experts, np.int64), np.zeros(num_experts, np.int64)
    own, own_before = np.zeros(num_slots, np.int64), np.zeros(num_slots, np.int64)
    near, near_before = np.zeros(num_groups, np.int64), np.zeros(num_groups, np.int64)
    # sources by rank, each rank's in their order
    begin = np.zeros(num_ranks + 1, np.int64)
    for n in range(num_sources):
        begin[source[n] + 1] += 1
    for r in range(num_ranks):
        begin[r + 1] += begin[r]
    by_rank = np.empty(num_sources, np.int64)
    used = begin[:-1].copy()
    for n in range(num_sources):
        by_rank[used[source[n]]] = n
        used[source[n]] += 1
    here = np.zeros(num_experts, np.int64)  # tokens of the node at hand
    here_before = np.zeros(num_experts, np.int64)
    signs = np.int64(0)
    first = 0  # the node's first rank in graph.order
    while first < num_ranks:
        k = graph.node[graph.order[first]]
        end = first
        while end < num_ranks and graph.node[graph.order[end]] == k:
            end += 1
        here[:] = 0
        here_before[:] = 0
        for i in range(first, end):
            r = graph.order[i]
            for j in range(begin[r], begin[r + 1]):
                n = by_rank[j]
                tokens = load[n]
                if n < row:
                    for e in range(num_experts):
                        here_before[e] += tokens[e]
                        signs |= tokens[e]
                else:
                    for e in range(num_experts):
                        here[e] += tokens[e]
                        signs |= tokens[e]
                for c in range(r * slots, (r + 1) * slots):
                    if graph.group_of[c] >= 0:
                        own[c] += tokens[graph.table[c]]
                        if n < row:
                            own_before[c] += tokens[graph.table[c]]
        for e in range(num_experts):
            total_before[e] += here_before[e]
            here[e] += here_before[e]
            total[e] += here[e]
        for i in range(first, end):
            r = graph.order[i]
            for c in range(r * slots, (r + 1) * slots):
                g = graph.group_of[c]
                if g >= 0:
                    near[g] = here[graph.table[c]]
                    near_before[g] = here_before[graph.table[c]]
        first = end
    return Origin(total, own, near), Origin(total_before, own_before, near_before), signs < 0


@compiled
def start(origin: Origin, graph: Graph) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A split without a token farther from its source than the nearest holder is.

    Own tokens stay, others stay on their node if they can. Where that leaves a choice, holders are filled up to the
    mean, the home first.

    Returns:
        fixed: [R * P] tokens that each slot serves because they start on its rank or node.
        movable: [R * P] its other tokens: where they are served makes no difference.
        load: [R] tokens that each rank serves.
    """
    count, where, rank_of, home_slot = graph.count, graph.where, graph.rank_of, graph.home_slot
    group_of, first, group_begin, group_end = graph.group_of, graph.first, graph.group_begin, graph.group_end
    fixed, movable = np.zeros(len(group_of), np.int64), np.zeros(len(group_of), np.int64)
    load = np.zeros(len(graph.node), np.int64)
    mean = -(-origin.total.sum() // len(load))
    for e in range(len(count)):
        if count[e] == 1:
            fixed[home_slot[e]] = origin.total[e]
            load[rank_of[home_slot[e]]] += origin.total[e]
    for c in range(len(group_of)):
        if group_of[c] >= 0:
            fixed[c] = origin.own[c]
            load[rank_of[c]] += origin.own[c]
    for e in range(len(count)):
        if count[e] == 1:
            continue
        far = origin.total[e]
        for g in range(first[e], first[e + 1]):
            left = origin.near[g]
            far -= left
            for k in range(group_begin[g], group_end[g]):
                left -= origin.own[where[e, k]]
            if left > 0:
                _pour(left, where[e, group_begin[g] : group_end[g]], home_slot[e], mean, rank_of, fixed, load)
        if far > 0:
            _pour(far, where[e, : count[e]], home_slot[e], mean, rank_of, movable, load)
    return fixed, movable, load


@borrowing
def _pour(
    tokens: int,
    holders: np.ndarray,
    home_slot: int,
    mean: int,
    rank_of: np.ndarray,
    served: np.ndarray,
    load: np.ndarray,
) -> None:
    """``tokens`` to the slots ``holders``, each rank up to ``mean``, the home first; what is left to that, too."""
    closest = holders[0]
    for c in holders:
        if c == home_slot:
            closest = c
    for i in range(-1, len(holders)):
        c = closest if i < 0 else holders[i]
        moved = min(tokens, max(0, mean - load[rank_of[c]]))
        served[c] += moved
        load[rank_of[c]] += moved
        tokens -= moved
        if tokens == 0:
            return
    served[closest] += tokens
    load[rank_of[closest]] += tokens
