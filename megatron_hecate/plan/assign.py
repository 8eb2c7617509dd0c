"""Whose tokens each slot serves: its own rank's first, then its node's, then others; in the order of sources.

What a source gets depends on what the sources before it took. That is known from sums over them (`origin.Origin`), so
one source's row costs no more than its length.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled
from megatron_hecate.plan.graph import Graph
from megatron_hecate.plan.origin import Origin


@compiled
def assign(
    load: np.ndarray,
    source: np.ndarray,
    graph: Graph,
    served: np.ndarray,
    everyone: Origin,
    before: Origin,
    row: int,
    tokens: np.ndarray,
) -> None:
    """Fill in ``tokens``.

    Args:
        load: [N, E].
        source: [N] rank of each source.
        served: [R * P] tokens of each slot, which sum to the load of its expert.
        everyone: sums over all sources.
        before: sums over the sources before ``row``; changed in place when all rows are written.
        row: the source to write, or -1 for all.
        tokens: [N, C] zeros, or [1, C] for one source.
    """
    spare = served.copy()  # [R * P] what a slot has left when its rank's sources are served,
    open_ = np.empty(len(served), np.int64)  # and when those of its node are
    on_node = np.zeros(len(graph.group_begin), np.int64)  # [G] sum of `spare`
    for g in range(len(on_node)):
        asking, e = everyone.near[g], graph.group_expert[g]
        for k in range(graph.group_begin[g], graph.group_end[g]):
            c = graph.where[e, k]
            asking -= min(everyone.own[c], served[c])
            spare[c] -= min(everyone.own[c], served[c])
            on_node[g] += spare[c]
        for k in range(graph.group_begin[g], graph.group_end[g]):
            c = graph.where[e, k]
            open_[c] = spare[c] - min(asking, spare[c])
            asking -= min(asking, spare[c])
    if row >= 0:
        _row(load, row, source[row], graph, served, spare, open_, on_node, before, tokens[0])
        return
    slots = len(served) // len(graph.node)
    for n in range(len(source)):
        r = source[n]
        _row(load, n, r, graph, served, spare, open_, on_node, before, tokens[n])
        for c in range(r * slots, (r + 1) * slots):
            if graph.group_of[c] >= 0:
                before.own[c] += load[n, graph.table[c]]
        for e in range(len(graph.count)):
            before.total[e] += load[n, e]
            for g in range(graph.first[e], graph.first[e + 1]):
                if graph.node[graph.rank_of[graph.where[e, graph.group_begin[g]]]] == graph.node[r]:
                    before.near[g] += load[n, e]


@borrowing
def _row(
    load: np.ndarray,
    row: int,
    rank: int,
    graph: Graph,
    served: np.ndarray,
    spare: np.ndarray,
    open_: np.ndarray,
    on_node: np.ndarray,
    before: Origin,
    tokens: np.ndarray,
) -> None:
    """The row of one source, which is on ``rank``: its tokens are [a, a + left) of those that ask, in three rounds."""
    for e in range(len(graph.count)):
        left = load[row, e]
        if left == 0:
            continue
        if graph.count[e] == 1:
            tokens[graph.column_of[graph.home_slot[e]]] = left
            continue
        group, a_near, a_far = -1, 0, before.total[e]
        for g in range(graph.first[e], graph.first[e + 1]):
            asking = before.near[g]
            for k in range(graph.group_begin[g], graph.group_end[g]):
                c = graph.where[e, k]
                taken = min(before.own[c], served[c])
                asking -= taken
                a_far -= taken
                if graph.rank_of[c] == rank:
                    mine = min(left, served[c] - taken)
                    tokens[graph.column_of[c]] = mine
                    left -= mine
            if graph.node[graph.rank_of[graph.where[e, graph.group_begin[g]]]] == graph.node[rank]:
                group, a_near = g, asking
            a_far -= min(asking, on_node[g])
        if group >= 0:
            at = 0  # of what the group has
            for k in range(graph.group_begin[group], graph.group_end[group]):
                c = graph.where[e, k]
                mine = min(left, max(0, at + spare[c] - a_near))
                tokens[graph.column_of[c]] += mine
                left -= mine
                a_near += mine
                at += spare[c]
        at = 0
        for k in range(graph.count[e]):
            if left == 0:
                break
            c = graph.where[e, k]
            mine = min(left, max(0, at + open_[c] - a_far))
            tokens[graph.column_of[c]] += mine
            left -= mine
            a_far += mine
            at += open_[c]
