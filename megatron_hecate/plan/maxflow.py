"""The smallest possible largest rank load, exactly: tokens as a flow from overloaded ranks to ranks with room.

A token can be computed by any holder of its expert, so tokens move along paths of ranks that share experts. Tokens
above a cap leave along shortest augmenting paths (breadth-first search, as in Edmonds and Karp's maximum flow). Where
no path is left, the tokens of all ranks that the search reached cannot leave them, so no split has a largest load below
the mean of these ranks; that becomes the cap, and the search goes on (Dinkelbach's method). All counts are integers.

Holders are a compressed list by expert: those of expert e are ``begin[e]:begin[e + 1]`` of ``rank`` [C], ascending.
"""

from __future__ import annotations

from typing import NamedTuple

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
    load = placement.checked_load(load)
    if not placement.num_replicas:  # nothing to choose, and nothing to compile
        tokens = np.zeros(placement.num_ranks, np.int64)
        np.add.at(tokens, placement.home, load)
    else:
        _, _, _, tokens, _ = balance(load, placement.table.copy(), 0, False)
    return int(tokens.max())


class Split(NamedTuple):
    """Tokens of each holder, and of each rank.

    Args:
        begin: [E + 1] where the holders of each expert begin, and the end.
        rank: [C] of each holder.
        share: [C] tokens of each holder.
        load: [R] tokens of each rank.
        blocked: [R] whether the rank is in the set that its tokens cannot leave.
    """

    begin: np.ndarray
    rank: np.ndarray
    share: np.ndarray
    load: np.ndarray
    blocked: np.ndarray


@compiled
def holders_of(num_experts: int, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``begin`` [E + 1] and ``rank`` [C] of the holders in ``table`` [R, P]."""
    begin = np.zeros(num_experts + 1, np.int64)
    for e in table.ravel():
        if e >= 0:
            begin[e + 1] += 1
    for e in range(num_experts):
        begin[e + 1] += begin[e]
    rank, used = np.empty(begin[-1], np.int64), begin.copy()
    for r in range(len(table)):
        for e in table[r]:
            if e >= 0:
                rank[used[e]] = r
                used[e] += 1
    return begin, rank


@compiled
def balance(total: np.ndarray, table: np.ndarray, slack: int, everywhere: bool) -> Split:
    """Split [E] ``total`` tokens over the holders in ``table`` [R, P] so that the largest load is the smallest
    possible.

    The largest load may exceed the mean by ``slack`` tokens before anything is done about it. ``everywhere`` also
    brings all other ranks to the mean that can get there.
    """
    num_experts, num_ranks = len(total), len(table)
    begin, rank = holders_of(num_experts, table)
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
    return Split(begin, rank, share, load, blocked)


@compiled
def rebalance(split: Split, expert: int, on: int, old: int) -> Split:
    """Balance everywhere again, from a split that is balanced, after a replica came to a rank.

    Most tokens stay where they are, which takes a fraction of the time of `balance`.

    Args:
        split: before; it stays as it is.
        expert: of the new replica.
        on: its rank.
        old: the expert whose replica it overwrites, which has a holder elsewhere; -1 where the slot was empty.
    """
    begin = split.begin.copy()
    for e in range(len(begin) - 1):
        begin[e + 1] += (1 if e >= expert else 0) - (1 if 0 <= old <= e else 0)
    rank, share = np.empty(begin[-1], np.int64), np.zeros(begin[-1], np.int64)
    load, moved, to = split.load.copy(), 0, 0
    for e in range(len(begin) - 1):
        waits = e == expert
        for c in range(split.begin[e], split.begin[e + 1]):
            if waits and split.rank[c] > on:
                rank[to], waits = on, False
                to += 1
            if e == old and split.rank[c] == on:
                moved = split.share[c]
                continue
            rank[to], share[to] = split.rank[c], split.share[c]
            to += 1
        if waits:
            rank[to] = on
            to += 1
    if old >= 0:
        least = begin[old]
        for c in range(begin[old], begin[old + 1]):
            least = c if load[rank[c]] < load[rank[least]] else least
        share[least] += moved
        load[on] -= moved
        load[rank[least]] += moved
    mean = -(-load.sum() // len(load))
    blocked = _augment(begin, rank, share, load, mean, True)
    _augment(begin, rank, share, load, mean, False)
    return Split(begin, rank, share, load, blocked)


@compiled
def _shared_by_rank(
    begin: np.ndarray, rank: np.ndarray, num_ranks: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
    seen, known = (
        np.full(num_ranks, -1),
        np.full(num_experts, -1),
    )  # the last search that reached the rank, the expert
    gives, takes = (
        np.empty(num_ranks, np.int64),
        np.empty(num_ranks, np.int64),
    )  # the holders on the path to a rank
    queue, sinks = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    stuck = np.zeros(num_ranks, np.bool_)
    search = 0
    for source in range(num_ranks):
        while load[source] > cap and not stuck[source]:
            queue[0], head, tail, found = source, 0, 1, 0
            seen[source] = search
            while head < tail and found == 0:
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
                        if seen[to] != search and not stuck[to]:
                            seen[to], gives[to], takes[to] = search, c, d
                            queue[tail] = to
                            tail += 1
                            if load[to] < cap:
                                sinks[found] = to
                                found += 1
            search += 1
            if found == 0:
                if not rises:  # no path leaves this set, so no later path enters it
                    for i in range(tail):
                        stuck[queue[i]] = True
                    break
                total = 0
                for i in range(tail):
                    total += load[queue[i]]
                cap = max(cap + 1, -(-total // tail))
                for r in range(num_ranks):
                    blocked[r] = seen[r] == search - 1
            for i in range(found):  # the least loaded first
                least = i
                for j in range(i + 1, found):
                    least = j if load[sinks[j]] < load[sinks[least]] else least
                sinks[i], sinks[least] = sinks[least], sinks[i]
                _push(rank, share, load, (source, sinks[i], cap), gives, takes)
    return blocked


@compiled
def _push(
    rank: np.ndarray,
    share: np.ndarray,
    load: np.ndarray,
    ends: tuple[int, int, int],
    gives: np.ndarray,
    takes: np.ndarray,
) -> None:
    """Move tokens, in place, along a path to a rank with room, as many as each of its experts has.

    Args:
        rank, share, load: as in `balance`.
        ends: the overloaded rank, the rank with room, and the load that neither passes.
        gives, takes: [R] on the path to a rank, the holder that gives tokens, and the rank's own that takes them.
    """
    source, sink, cap = ends
    amount, r = min(load[source] - cap, cap - load[sink]), sink
    while r != source and amount > 0:
        amount = min(amount, share[gives[r]])
        r = rank[gives[r]]
    if amount <= 0:
        return
    r = sink
    while r != source:
        share[gives[r]] -= amount
        share[takes[r]] += amount
        r = rank[gives[r]]
    load[source] -= amount
    load[sink] += amount
