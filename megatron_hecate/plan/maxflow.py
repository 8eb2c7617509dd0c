"""The smallest possible largest rank load, exactly: tokens as a flow from overloaded ranks to ranks with room.

A token can be computed by any holder of its expert, so tokens move along paths of ranks that share experts. Tokens
above a cap leave along shortest augmenting paths (breadth-first search, as in Edmonds and Karp's maximum flow). Where
no path is left, the tokens of all ranks that the search reached cannot leave them, so no split has a largest load below
the mean of these ranks; that becomes the cap, and the search goes on (Dinkelbach's method). All counts are integers.

Holders are a compressed list by expert: those of expert e are ``begin[e]:begin[e + 1]`` of ``rank`` [C], ascending.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.compiled import compiled
from megatron_hecate.plan.placement import Placement


def largest_load(load: np.ndarray, placement: Placement) -> int:
    """The smallest possible largest rank load over all splits of tokens among the holders of their experts.

    Args:
        load: [E] int, tokens of each expert, summed over all sources; less than 2^62 in all.
        placement: homes and replicas.

    Returns:
        Tokens of the fullest rank, exact.

    Raises:
        ValueError: for loads that do not fit the placement, are negative or are no integers.
    """
    _, _, _, tokens, _ = balance(placement.checked_load(load), placement.table.copy(), 0, False)
    return int(tokens.max())


@compiled
def balance(
    total: np.ndarray, table: np.ndarray, slack: int, everywhere: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Split [E] ``total`` tokens over the holders in ``table`` [R, P] so that the largest load is the smallest
    possible.

    The largest load may exceed the mean by ``slack`` tokens before anything is done about it. ``everywhere`` also
    brings all other ranks to the mean that can get there.

    Returns:
        ``begin`` [E + 1] and ``rank`` [C] of the holders, tokens of each holder [C], tokens of each rank [R], and
        whether a rank is in the set [R] that its tokens cannot leave.
    """
    num_experts, num_ranks = len(total), len(table)
    begin = np.zeros(num_experts + 1, np.int64)
    for e in table.ravel():
        if e >= 0:
            begin[e + 1] += 1
    for e in range(num_experts):
        begin[e + 1] += begin[e]
    rank, used = np.empty(begin[-1], np.int64), begin.copy()
    for r in range(num_ranks):
        for e in table[r]:
            if e >= 0:
                rank[used[e]] = r
                used[e] += 1
    share, load = np.zeros(len(rank), np.int64), np.zeros(num_ranks, np.int64)
    for e in range(num_experts):
        count = begin[e + 1] - begin[e]
        for c in range(begin[e], begin[e + 1]):
            share[c] = total[e] // count + (c - begin[e] < total[e] % count)
            load[rank[c]] += share[c]
    mean = -(-load.sum() // num_ranks)
    blocked = _augment(begin, rank, share, load, mean + slack, True)
    if everywhere:
        _augment(begin, rank, share, load, mean, False)
    return begin, rank, share, load, blocked


@compiled
def _shared_by_rank(begin: np.ndarray, rank: np.ndarray, num_ranks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Holders by rank, of experts that have several: ``first`` [R + 1] and the holders; and the expert of each [C]."""
    first, expert = np.zeros(num_ranks + 1, np.int64), np.empty(len(rank), np.int64)
    for e in range(len(begin) - 1):
        for c in range(begin[e], begin[e + 1]):
            expert[c] = e
            first[rank[c] + 1] += 1 if begin[e + 1] - begin[e] > 1 else 0
    for r in range(num_ranks):
        first[r + 1] += first[r]
    holder, used = np.empty(first[-1], np.int64), first.copy()
    for c in range(len(rank)):
        if begin[expert[c] + 1] - begin[expert[c]] > 1:
            holder[used[rank[c]]] = c
            used[rank[c]] += 1
    return first, holder, expert


@compiled
def _augment(
    begin: np.ndarray, rank: np.ndarray, share: np.ndarray, load: np.ndarray, cap: int, rises: bool
) -> np.ndarray:
    """Move tokens, in place, until no rank is above the ``cap``, which rises as far as it must, or no rank can lose
    more.

    Returns the set [R] that its tokens cannot leave.
    """
    num_ranks, num_experts = len(load), len(begin) - 1
    first, holder, expert = _shared_by_rank(begin, rank, num_ranks)
    blocked = np.zeros(num_ranks, np.bool_)
    seen, known = np.full(num_ranks, -1), np.full(num_experts, -1)  # the last search that reached the rank, the expert
    gives, takes = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)  # the holders on the path to a rank
    queue = np.empty(num_ranks, np.int64)
    search = 0
    for source in range(num_ranks):
        while load[source] > cap:
            queue[0], head, tail, sink = source, 0, 1, -1
            seen[source] = search
            while head < tail and sink < 0:
                r = queue[head]
                head += 1
                for i in range(first[r], first[r + 1]):
                    c = holder[i]
                    e = expert[c]
                    if known[e] == search or share[c] == 0:
                        continue
                    known[e] = search
                    for d in range(begin[e], begin[e + 1]):
                        to = rank[d]
                        if seen[to] != search:
                            seen[to], gives[to], takes[to] = search, c, d
                            queue[tail] = to
                            tail += 1
                            if load[to] < cap and (sink < 0 or load[to] < load[sink]):
                                sink = to
            search += 1
            if sink < 0:
                if not rises:
                    break
                total = 0
                for i in range(tail):
                    total += load[queue[i]]
                cap = max(cap + 1, -(-total // tail))
                for r in range(num_ranks):
                    blocked[r] = seen[r] == search - 1
            else:
                amount, r = min(load[source] - cap, cap - load[sink]), sink
                while r != source:
                    amount = min(amount, share[gives[r]])
                    r = rank[gives[r]]
                r = sink
                while r != source:
                    share[gives[r]] -= amount
                    share[takes[r]] += amount
                    r = rank[gives[r]]
                load[source] -= amount
                load[sink] += amount
    return blocked
