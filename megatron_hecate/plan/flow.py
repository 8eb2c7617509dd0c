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

`level` is a maximum flow inside Dinkelbach's iteration for the ratio ``tokens confined to a set of ranks / ranks of
that set``, whose maximum is the smallest possible largest rank load. The flow goes in waves: tokens above the cap move
along shortest ways to ranks with room, from the farthest ranks to the nearest, and stay where they do not get on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hecate.plan.compiled import compiled

NO_LIMIT: int = 1 << 62


class Links(NamedTuple):
    """The slots whose tokens can be served elsewhere: a *link* joins each with its expert, if that has other holders.

    Args:
        slot: [L] a link's physical slot; links are ordered by expert, as in ``where``.
        rank: [L] its rank.
        expert: [L] its expert, among the X that have several holders.
        begin: [X + 1] where the links of each expert begin.
        first: [R + 2] where those of each rank begin in ``by_rank``; one more than needed.
        by_rank: [L] links by rank, then expert.
    """

    slot: np.ndarray
    rank: np.ndarray
    expert: np.ndarray
    begin: np.ndarray
    first: np.ndarray
    by_rank: np.ndarray


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
def _links(table: np.ndarray, count: np.ndarray, where: np.ndarray, num_ranks: int) -> Links:
    """The links of a graph."""
    slots = len(table) // num_ranks
    rank_of = np.empty(len(table), np.int64)  # of each slot; a division for each look would take longer
    for r in range(num_ranks):
        rank_of[r * slots : (r + 1) * slots] = r
    size = 0
    for e in range(len(count)):
        size += count[e] if count[e] > 1 else 0
    slot, rank, expert = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    begin = np.empty(len(count) + 1, np.int64)
    first = np.zeros(num_ranks + 2, np.int64)
    i, x = 0, 0
    for e in range(len(count)):
        if count[e] > 1:
            begin[x] = i
            for k in range(count[e]):
                slot[i] = where[e, k]
                rank[i] = rank_of[slot[i]]
                expert[i] = x
                first[rank[i] + 2] += 1
                i += 1
            x += 1
    begin[x] = i
    for r in range(num_ranks):
        first[r + 2] += first[r + 1]
    by_rank = np.empty(size, np.int64)
    for i in range(size):
        by_rank[first[rank[i] + 1]] = i
        first[rank[i] + 1] += 1
    return Links(slot, rank, expert, begin[: x + 1], first, by_rank)


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
    patient: bool = False,
) -> int:
    """Move tokens, in place, until the largest rank load is as small as it can be.

    A slot of expert e keeps ``least[e]`` [E] tokens, and must have so many. A largest load of ``enough`` is small
    enough. When the optimum is above ``most``, stop as soon as that is known, and in any case after so many ``rounds``.
    A ``patient`` search first moves all that can get to the mean, or ``enough``, however high the optimum is.

    Returns:
        The optimum (``enough``, if that is larger), or something above ``most``. ``visited`` [R] then marks a
        set of ranks that explains a largest load above the mean: their tokens cannot leave it.
    """
    num_ranks = len(load)
    links = _links(table, count, where, num_ranks)
    slot, rank, expert, begin, first, by_rank = links
    spare = np.empty(len(slot), np.int64)  # tokens that may leave by each link
    for i in range(len(slot)):
        spare[i] = served[slot[i]] - least[table[slot[i]]]
    visited[:] = False
    cap = max(enough, -(-load.sum() // num_ranks))
    hops = np.empty(num_ranks, np.int64)  # from each rank to one with room, -1: none, or not looked at
    queue = np.empty(num_ranks, np.int64)
    seen = np.empty(len(begin) - 1, np.bool_)
    result = NO_LIMIT
    for _ in range(rounds):
        # breadth-first, back from all ranks with room, as far as there are ranks above the cap
        seen[:] = False
        found, above = 0, 0
        for r in range(num_ranks):
            hops[r] = -1
            if load[r] < cap:
                hops[r] = 0
                queue[found] = r
                found += 1
            elif load[r] > cap:
                above += 1
        if above == 0:
            result = cap
            break
        roomy, blocked, head = found, above, 0
        while head < found and blocked > 0:
            b = queue[head]
            head += 1
            far = hops[b] + 1
            for at in range(first[b], first[b + 1]):
                x = expert[by_rank[at]]
                if seen[x]:
                    continue
                seen[x] = True
                for i in range(begin[x], begin[x + 1]):
                    a = rank[i]
                    if hops[a] < 0 and spare[i] > 0:
                        hops[a] = far
                        queue[found] = a
                        found += 1
                        blocked -= load[a] > cap
        if blocked > 0 and (blocked == above or not patient):
            cap = _confined(links, spare, load, cap, hops, queue, seen, visited)
            if cap > most:
                result = cap
                break
            continue
        # from the farthest ranks to the nearest, what is above the cap goes one hop
        for t in range(found - 1, roomy - 1, -1):
            a = queue[t]
            excess = load[a] - cap
            if excess <= 0:
                continue
            near = hops[a] - 1
            for at in range(first[a], first[a + 1]):
                i = by_rank[at]
                can = min(excess, spare[i])
                if can == 0:
                    continue
                for j in range(begin[expert[i]], begin[expert[i] + 1]):
                    b = rank[j]
                    if hops[b] != near:
                        continue
                    amount = can
                    if near == 0:  # no more than fits
                        amount = min(can, cap - load[b])
                    spare[i] -= amount
                    spare[j] += amount
                    load[b] += amount
                    excess -= amount
                    can -= amount
                    if can == 0:
                        break
                if excess == 0:
                    break
            load[a] = cap + excess
    for i in range(len(slot)):
        served[slot[i]] = spare[i] + least[table[slot[i]]]
    return result


@compiled
def _confined(
    links: Links,
    spare: np.ndarray,
    load: np.ndarray,
    cap: int,
    hops: np.ndarray,
    queue: np.ndarray,
    seen: np.ndarray,
    visited: np.ndarray,
) -> int:
    """The largest mean load, rounded up, of the parts that blocked ranks and those they reach fall into.

    Ranks are in one part when an expert passes tokens between them. ``visited`` marks the part; ``queue`` and ``seen``
    are room to work in.
    """
    part = np.arange(len(load))  # a rank of the same part, nearer to its first
    visited[:] = False
    seen[:] = False
    tail = 0
    for r in range(len(load)):
        if load[r] > cap and hops[r] < 0:
            visited[r] = True
            queue[tail] = r
            tail += 1
    head = 0
    while head < tail:
        r = queue[head]
        head += 1
        for at in range(links.first[r], links.first[r + 1]):
            i = links.by_rank[at]
            x = links.expert[i]
            if seen[x] or spare[i] == 0:
                continue
            seen[x] = True
            a = _first(part, r)
            for j in range(links.begin[x], links.begin[x + 1]):
                if not visited[links.rank[j]]:
                    visited[links.rank[j]] = True
                    queue[tail] = links.rank[j]
                    tail += 1
                b = _first(part, links.rank[j])
                part[max(a, b)] = min(a, b)
                a = min(a, b)
    total, ranks = np.zeros(len(load), np.int64), np.zeros(len(load), np.int64)
    for r in queue[:tail]:
        total[_first(part, r)] += load[r]
        ranks[_first(part, r)] += 1
    cap, fullest = 0, 0
    for r in range(len(load)):
        if ranks[r] > 0 and -(-total[r] // ranks[r]) > cap:
            cap, fullest = -(-total[r] // ranks[r]), r
    for r in queue[:tail]:
        visited[r] = _first(part, r) == fullest
    return cap


@compiled
def _first(part: np.ndarray, rank: int) -> int:
    """The first rank of the part that ``rank`` belongs to."""
    while part[rank] != rank:
        part[rank] = part[part[rank]]
        rank = part[rank]
    return rank
