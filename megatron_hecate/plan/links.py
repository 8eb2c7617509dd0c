"""Who holds what, as lists: the holders of each expert, and the links by which tokens move between ranks.

Holders are named by physical slot; `flow` says what the arrays are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled


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
def by_home(home: np.ndarray, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Experts by their home: [R + 1] where each rank's begin, and [E] the experts."""
    first = np.zeros(num_ranks + 1, np.int64)
    for r in home:
        first[r + 1] += 1
    first = np.cumsum(first)
    used, experts = first.copy(), np.empty(len(home), np.int64)
    for e in range(len(home)):
        experts[used[home[e]]] = e
        used[home[e]] += 1
    return first, experts


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


@borrowing
def put(slot: int, expert: int, table: np.ndarray, count: np.ndarray, where: np.ndarray) -> tuple[int, int]:
    """``expert`` takes ``slot``, in place. Returns who was there, or -1, and its place in the row of ``where``."""
    old, place = table[slot], -1
    if old >= 0:
        count[old] -= 1
        place = count[old]
        while where[old, place] != slot:
            place -= 1
        where[old, place] = where[old, count[old]]
    where[expert, count[expert]] = slot
    count[expert] += 1
    table[slot] = expert
    return old, place


@borrowing
def take_back(slot: int, old: int, place: int, table: np.ndarray, count: np.ndarray, where: np.ndarray) -> None:
    """Undo the last `put`, which returned ``old`` and ``place``."""
    count[table[slot]] -= 1
    table[slot] = old
    if old >= 0:
        where[old, count[old]] = where[old, place]
        where[old, place] = slot
        count[old] += 1


@compiled
def links_of(table: np.ndarray, count: np.ndarray, where: np.ndarray, num_ranks: int) -> Links:
    """The links of the experts that have several holders."""
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
