"""Tokens as a flow through the graph of holders: the compiled core of quotas and planners.

Ranks are joined by the experts they share: a token that rank a serves can be served by any other holder of its expert,
which in turn can pass on others. Holders of one expert are numbered by *physical slot* (``rank * P + slot``), as
everywhere in FSSDP. Everything is 64-bit integers: all ranks compute the same, bit for bit, on any machine.

Arrays that the functions here share:

    table   [R * P]  expert in each physical slot, or -1
    count   [E]      holders of each expert
    where   [E, W]   their physical slots, the first ``count[e]`` of them; W may be what an expert can have at most
    served  [R * P]  tokens each slot serves
    load    [R]      tokens each rank serves

`level` is Dinic's maximum flow (blocking flows along shortest paths) inside Dinkelbach's iteration for the ratio
``tokens confined to a set of ranks / ranks of that set``, whose maximum is the smallest possible largest rank load.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.compiled import compiled

NO_LIMIT: int = 1 << 62


@compiled
def holders(table: np.ndarray, order: np.ndarray, num_experts: int, spare: int) -> tuple[np.ndarray, np.ndarray]:
    """``count``, and ``where`` with room for ``spare`` holders more than the most that an expert has.

    Narrow rows keep a large graph in the cache. ``order`` [R] says in which order ranks come.
    """
    slots = len(table) // len(order)
    count = np.zeros(num_experts, np.int64)
    for e in table:
        if e >= 0:
            count[e] += 1
    where = np.empty((num_experts, min(len(order), count.max() + spare)), np.int64)
    count[:] = 0
    for r in order:
        for c in range(r * slots, (r + 1) * slots):
            e = table[c]
            if e >= 0:
                where[e, count[e]] = c
                count[e] += 1
    return count, where


@compiled
def level(
    table: np.ndarray,
    count: np.ndarray,
    where: np.ndarray,
    served: np.ndarray,
    load: np.ndarray,
    least: np.ndarray,
    enough: int,
    most: int,
    visited: np.ndarray,
    rounds: int = NO_LIMIT,
) -> int:
    """Move tokens, in place, until the largest rank load is as small as it can be.

    A token never leaves a slot of expert e that serves ``least[e]`` [E] or fewer. A largest load of ``enough`` is small
    enough. When the optimum is above ``most``, stop as soon as that is known, and in any case after so many ``rounds``.

    Returns:
        The optimum (``enough``, if that is larger), or something above ``most``. ``visited`` [R] then marks a
        set of ranks that explains a largest load above the mean: their tokens cannot leave it.
    """
    num_ranks = len(load)
    slots = len(table) // num_ranks
    rank_of = np.empty(len(table), np.int64)  # of each slot; a division for each look would take longer
    total = 0
    for r in range(num_ranks):
        total += load[r]
        visited[r] = False
        rank_of[r * slots : (r + 1) * slots] = r
    cap = max(enough, -(-total // num_ranks))
    depth = np.empty(num_ranks, np.int64)  # of ranks and of experts in the breadth-first search, -1: not reached
    expert_depth = np.empty(len(count), np.int64)
    queue = np.empty(num_ranks, np.int64)
    rank_arc = np.empty(num_ranks, np.int64)  # next slot a rank tries, next holder an expert tries
    expert_arc = np.empty(len(count), np.int64)
    path = np.empty(num_ranks + 1, np.int64)  # ranks, and the slots their tokens leave by
    left_by = np.empty(num_ranks + 1, np.int64)
    for _ in range(rounds):
        # breadth-first from all ranks above the cap, to the nearest with room
        depth[:] = -1
        expert_depth[:] = -1
        tail = 0
        for r in range(num_ranks):
            if load[r] > cap:
                depth[r] = 0
                rank_arc[r] = r * slots
                queue[tail] = r
                tail += 1
        if tail == 0:
            return cap
        sources = tail
        found = num_ranks + 1  # depth at which there is room
        head = 0
        while head < tail:
            a = queue[head]
            head += 1
            if depth[a] >= 2 * found:  # a little farther than to the nearest: fewer searches in all
                break
            for c in range(a * slots, (a + 1) * slots):
                e = table[c]
                if e < 0 or count[e] < 2 or expert_depth[e] >= 0 or served[c] <= least[e]:
                    continue
                expert_depth[e] = depth[a]
                expert_arc[e] = 0
                for k in range(count[e]):
                    b = rank_of[where[e, k]]
                    if depth[b] < 0:
                        depth[b] = depth[a] + 1
                        queue[tail] = b
                        tail += 1
                        rank_arc[b] = b * slots
                        if load[b] < cap:
                            found = min(found, depth[b])
        if found > num_ranks:  # nothing leaves the ranks that were reached, nor any part of them without ways between
            cap = _confined(count, where, rank_of, load, expert_depth, queue[:tail], visited)
            if cap > most:
                return cap
            continue
        # depth-first along arcs that lead one level down
        for i in range(sources):
            source = queue[i]
            while load[source] > cap:
                top = 0
                path[0] = source
                end = -1
                while top >= 0:
                    a = path[top]
                    if load[a] < cap:
                        end = a
                        break
                    step = -1
                    while rank_arc[a] < (a + 1) * slots:
                        c = rank_arc[a]
                        e = table[c]
                        if e >= 0 and expert_depth[e] == depth[a] and served[c] > least[e]:
                            while expert_arc[e] < count[e]:
                                b = rank_of[where[e, expert_arc[e]]]
                                if depth[b] == depth[a] + 1:
                                    step = b
                                    break
                                expert_arc[e] += 1
                            if step >= 0:
                                left_by[top] = c
                                break
                        rank_arc[a] += 1
                    if step >= 0:
                        top += 1
                        path[top] = step
                    else:
                        depth[a] = -2  # dead end
                        top -= 1
                        if top >= 0:
                            expert_arc[table[left_by[top]]] += 1
                if end < 0:
                    break
                amount = min(load[source] - cap, cap - load[end])
                for k in range(top):
                    c = left_by[k]
                    amount = min(amount, served[c] - least[table[c]])
                for k in range(top):
                    c = left_by[k]
                    e = table[c]
                    served[c] -= amount
                    served[where[e, expert_arc[e]]] += amount
                load[source] -= amount
                load[end] += amount
                if load[end] >= cap:
                    depth[end] = -2
    return NO_LIMIT


@compiled
def _confined(
    count: np.ndarray,
    where: np.ndarray,
    rank_of: np.ndarray,
    load: np.ndarray,
    expert_depth: np.ndarray,
    reached: np.ndarray,
    visited: np.ndarray,
) -> int:
    """The largest mean load, rounded up, of the parts that the ``reached`` ranks fall into; ``visited`` marks it.

    Ranks are in one part when an expert passes tokens between them, those with an ``expert_depth``.
    """
    part = np.arange(len(load))  # a rank of the same part, nearer to its first
    for e in range(len(count)):
        if expert_depth[e] >= 0:
            a = _first(part, rank_of[where[e, 0]])
            for k in range(1, count[e]):
                b = _first(part, rank_of[where[e, k]])
                part[max(a, b)] = min(a, b)
                a = min(a, b)
    total, ranks = np.zeros(len(load), np.int64), np.zeros(len(load), np.int64)
    for r in reached:
        total[_first(part, r)] += load[r]
        ranks[_first(part, r)] += 1
    cap, fullest = 0, 0
    for r in range(len(load)):
        if ranks[r] > 0 and -(-total[r] // ranks[r]) > cap:
            cap, fullest = -(-total[r] // ranks[r]), r
    visited[:] = False
    for r in reached:
        visited[r] = _first(part, r) == fullest
    return cap


@compiled
def _first(part: np.ndarray, rank: int) -> int:
    """The first rank of the part that ``rank`` belongs to."""
    while part[rank] != rank:
        part[rank] = part[part[rank]]
        rank = part[rank]
    return rank
