"""The graph of holders: a placement as the compiled functions see it, computed once per placement.

Between calls from Python it is one array (`pack`): handing over its many arrays one by one takes longer than some of
the functions that need them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hecate.plan.compiled import compiled
from megatron_hecate.plan.links import Links, holders, links_of

CROSSING: int = 1 << 20  # what a token pays to cross nodes: dearer than any path inside them


class Graph(NamedTuple):
    """Experts, their holders and the ways that tokens can take between them.

    Holders of an expert on one node are a *group*. For `nearest`, ranks, groups and experts are the V vertices of a
    network, as far as experts have several holders; a *joint* is what two of them are joined by: slot c joins its rank
    and its group, joint ``R * P + g`` joins group g and its expert. A group of one holder needs no vertex, its tokens
    pass through the slot's joint; an expert on one node needs none, its tokens pass through the group.

    Args:
        table: [R * P] expert in each slot, or -1.
        node: [R] node of each rank, 0 to K - 1.
        order: [R] ranks, by node, then rank.
        rank_of: [R * P] rank of each slot.
        count: [E] holders of each expert.
        where: [E, W] their slots, by node, then rank.
        home_slot: [E] the slot that is an expert's home.
        links: between slots and experts.
        column_of: [R * P] column of each slot when (expert, holder) pairs are sorted by expert, then rank; or -1.
        rank: [C] rank of each column.
        expert: [C] expert of each column.
        first: [E + 1] first group of each expert; experts with one holder have no group.
        group_expert: [G] the group's expert.
        group_begin, group_end: [G] the group's holders in its expert's row of ``where``.
        group_of: [R * P] group of each slot, or -1.
        alone: [R * P] group of each slot that is joined to its expert directly, or -1.
        height: [V] what a token pays on its way from the vertex to a rank that is not near: 0, 1 or ``CROSSING``.
        leaves: [V + 1] where the arcs of each vertex begin in the next three.
        to: [A] the vertex an arc leads to.
        twin: [A] the arc back.
        joint: [A] its joint j when tokens leave a holder by it, ``~j`` when they come to a holder.
    """

    table: np.ndarray
    node: np.ndarray
    order: np.ndarray
    rank_of: np.ndarray
    count: np.ndarray
    where: np.ndarray
    home_slot: np.ndarray
    links: Links
    column_of: np.ndarray
    rank: np.ndarray
    expert: np.ndarray
    first: np.ndarray
    group_expert: np.ndarray
    group_begin: np.ndarray
    group_end: np.ndarray
    group_of: np.ndarray
    alone: np.ndarray
    height: np.ndarray
    leaves: np.ndarray
    to: np.ndarray
    twin: np.ndarray
    joint: np.ndarray


@compiled
def graph_of(table: np.ndarray, home: np.ndarray, node: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The graph, packed, of ``table`` [R * P] with ``home`` [E]; ``node`` and ``order`` [R] as in `Graph`."""
    num_ranks, num_experts = len(node), len(home)
    slots = len(table) // num_ranks
    count, where = holders(table, order, num_experts, 0)
    rank_of = np.empty(len(table), np.int64)
    home_slot = np.empty(num_experts, np.int64)
    column_of = np.full(len(table), -1, np.int64)
    rank, expert = np.empty(count.sum(), np.int64), np.empty(count.sum(), np.int64)
    used = np.cumsum(count) - count
    for r in range(num_ranks):
        for c in range(r * slots, (r + 1) * slots):
            e = table[c]
            rank_of[c] = r
            if e >= 0:
                column_of[c] = used[e]
                rank[used[e]] = r
                expert[used[e]] = e
                used[e] += 1
                if home[e] == r:
                    home_slot[e] = c
    first, group_expert, group_begin, group_end, group_of = _groups(count, where, rank_of, node)
    alone, height, leaves, to, twin, joint = _arcs(group_of, first, group_begin, group_end, where, num_ranks)
    links = links_of(table, count, where, num_ranks)
    return pack(
        Graph(
            table.copy(), node.copy(), order.copy(), rank_of, count, where, home_slot, links, column_of, rank, expert,
            first, group_expert, group_begin, group_end, group_of, alone, height, leaves, to, twin, joint,
        )
    )  # fmt: skip


@compiled
def pack(graph: Graph) -> np.ndarray:
    """All arrays of a graph in the order of their names, behind the places where they begin."""
    links = graph.links
    arrays = (
        graph.table, graph.node, graph.order, graph.rank_of, graph.count, graph.where.ravel(), graph.home_slot,
        links.slot, links.rank, links.expert, links.begin, links.first, links.by_rank,
        graph.column_of, graph.rank, graph.expert, graph.first, graph.group_expert, graph.group_begin, graph.group_end,
        graph.group_of, graph.alone, graph.height, graph.leaves, graph.to, graph.twin, graph.joint,
    )  # fmt: skip
    size = len(arrays) + 1
    for array in arrays:
        size += len(array)
    packed = np.empty(size, np.int64)
    begin = len(arrays) + 1
    for i in range(len(arrays)):
        packed[i] = begin
        packed[begin : begin + len(arrays[i])] = arrays[i]
        begin += len(arrays[i])
    packed[len(arrays)] = begin
    return packed


@compiled
def unpack(packed: np.ndarray) -> Graph:
    """The graph that was packed; its arrays are views."""
    p, count = packed, _part(packed, 4)
    links = Links(_part(p, 7), _part(p, 8), _part(p, 9), _part(p, 10), _part(p, 11), _part(p, 12))
    return Graph(
        _part(p, 0), _part(p, 1), _part(p, 2), _part(p, 3), count, _part(p, 5).reshape((len(count), -1)), _part(p, 6),
        links, _part(p, 13), _part(p, 14), _part(p, 15), _part(p, 16), _part(p, 17), _part(p, 18), _part(p, 19),
        _part(p, 20), _part(p, 21), _part(p, 22), _part(p, 23), _part(p, 24), _part(p, 25), _part(p, 26),
    )  # fmt: skip


@compiled
def _part(packed: np.ndarray, i: int) -> np.ndarray:
    """Array ``i`` of a packed graph."""
    return packed[packed[i] : packed[i + 1]]


def columns(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``expert`` and ``rank`` of a packed graph."""
    begin = packed[14:17].tolist()
    return packed[begin[1] : begin[2]], packed[begin[0] : begin[1]]


@compiled
def _groups(
    count: np.ndarray, where: np.ndarray, rank_of: np.ndarray, node: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """``first``, ``group_expert``, ``group_begin``, ``group_end`` and ``group_of``."""
    first = np.empty(len(count) + 1, np.int64)
    most = count.sum()
    expert, begin, end = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    group_of = np.full(len(rank_of), -1, np.int64)
    g = 0
    for e in range(len(count)):
        first[e] = g
        if count[e] < 2:
            continue
        for k in range(count[e]):
            if k == 0 or node[rank_of[where[e, k]]] != node[rank_of[where[e, k - 1]]]:
                expert[g], begin[g] = e, k
                g += 1
            end[g - 1] = k + 1
            group_of[where[e, k]] = g - 1
    first[len(count)] = g
    return first, expert[:g], begin[:g], end[:g], group_of


@compiled
def _arcs(
    group_of: np.ndarray,
    first: np.ndarray,
    group_begin: np.ndarray,
    group_end: np.ndarray,
    where: np.ndarray,
    num_ranks: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """``alone``, ``height``, ``leaves``, ``to``, ``twin`` and ``joint``."""
    num_slots, num_groups, num_experts = len(group_of), first[-1], len(first) - 1
    slots = num_slots // num_ranks
    alone = np.full(num_slots, -1, np.int64)
    height = np.zeros(num_ranks + num_groups + num_experts, np.int64)
    # the ends of each joint, that nearer to the ranks first
    low, high = np.full(num_slots + num_groups, -1, np.int64), np.empty(num_slots + num_groups, np.int64)
    size = num_ranks
    for e in range(num_experts):
        top = -1
        if first[e + 1] - first[e] > 1:
            top = size
            height[top] = CROSSING
            size += 1
        for g in range(first[e], first[e + 1]):
            hub = top
            if top < 0 or group_end[g] - group_begin[g] > 1:
                hub = size
                height[hub] = 1
                size += 1
                if top >= 0:
                    low[num_slots + g], high[num_slots + g] = hub, top
            for k in range(group_begin[g], group_end[g]):
                c = where[e, k]
                low[c], high[c] = c // slots, hub
                if hub == top:
                    alone[c] = g
    leaves = np.zeros(size + 1, np.int64)
    for j in range(len(low)):
        if low[j] >= 0:
            leaves[low[j] + 1] += 1
            leaves[high[j] + 1] += 1
    for v in range(size):
        leaves[v + 1] += leaves[v]
    used = leaves[:-1].copy()
    to, twin, joint = np.empty(leaves[-1], np.int64), np.empty(leaves[-1], np.int64), np.empty(leaves[-1], np.int64)
    for j in range(len(low)):
        if low[j] >= 0:
            a, b = used[low[j]], used[high[j]]
            to[a], twin[a], joint[a] = high[j], b, j
            to[b], twin[b], joint[b] = low[j], a, ~j
            used[low[j]] += 1
            used[high[j]] += 1
    return alone, height[:size].copy(), leaves, to, twin, joint
