"""Exact minimum of the largest rank load: tokens flow from overloaded ranks to ranks with room.

Any holder of its expert can compute a token, so tokens move along paths of ranks that share
experts. Tokens above a cap leave along shortest augmenting paths (breadth-first search, as in
Edmonds and Karp's maximum flow). If no path is left, the search has reached a closed set of ranks:
their tokens cannot leave the set, so its mean load is a lower bound for the largest load of any
split. The mean becomes the new cap, and the search continues (Dinkelbach's method). All counts are
integers.

Holders are a compressed list by expert: expert e has the holders ``begin[e]:begin[e + 1]`` of
``rank`` [C], in ascending order. C counts all holders.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hecate.plan.compiled import compiled
from megatron_hecate.plan.placement import Placement


def largest_load(load: np.ndarray, placement: Placement) -> int:
    """Minimize the largest rank load over all splits of tokens among their experts' holders.

    Args:
        load: [E] int, tokens of each expert, summed over all sources; less than 2^62 in all.
        placement: homes and replicas.

    Returns:
        Tokens of the fullest rank, exact.
    """
    load = np.ascontiguousarray(load, dtype=np.int64)
    # Without replicas there is one split only. A job without slots then compiles nothing.
    if not placement.num_replicas:
        tokens = np.zeros(placement.num_ranks, np.int64)
        np.add.at(tokens, placement.home, load)
    else:
        _, _, _, tokens, _ = balance(load, placement.table.copy(), 0, False)
    return int(tokens.max())


class Split(NamedTuple):
    """Split of all tokens over holders.

    Args:
        begin: [E + 1] offsets of each expert's holders.
        rank: [C] rank of each holder.
        share: [C] tokens of each holder.
        load: [R] tokens of each rank.
        blocked: [R] bool, ranks of the closed set: no tokens can leave it.
    """

    begin: np.ndarray
    rank: np.ndarray
    share: np.ndarray
    load: np.ndarray
    blocked: np.ndarray


@compiled
def holders_of(num_experts: int, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """List the holders in ``table`` [R, P]: offsets by expert [E + 1] and ranks [C]."""
    begin = np.zeros(num_experts + 1, np.int64)
    for e in table.ravel():
        if e >= 0:
            begin[e + 1] += 1
    for e in range(num_experts):
        begin[e + 1] += begin[e]
    rank = np.empty(begin[-1], np.int64)
    ends = begin.copy()
    for r in range(len(table)):
        for e in table[r]:
            if e >= 0:
                rank[ends[e]] = r
                ends[e] += 1
    return begin, rank


@compiled
def balance(total: np.ndarray, table: np.ndarray, slack: int, everywhere: bool) -> Split:
    """Split tokens over holders so that the largest rank load is minimal.

    Args:
        total: [E] int64 tokens.
        table: [R, P] experts.
        slack: tokens above the mean that a rank load may have; smaller excesses are not optimized.
        everywhere: whether to bring all other ranks down to the mean, too, as far as possible.
    """
    num_experts = len(total)
    num_ranks = len(table)
    begin, rank = holders_of(num_experts, table)
    share = np.zeros(len(rank), np.int64)
    load = np.zeros(num_ranks, np.int64)
    # start from an even split, whose remainder is taken by the first holders
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
    """Balance a split again, everywhere, after a rank got a new replica.

    Most tokens keep their holder, so this takes a fraction of the time of `balance`.

    Args:
        split: the balanced split before; not modified.
        expert: expert of the new replica.
        on: rank of the new replica.
        old: expert of the overwritten replica, which has another holder; -1 for an empty slot.
    """
    begin = split.begin.copy()
    for e in range(len(begin) - 1):
        begin[e + 1] += int(e >= expert) - int(0 <= old <= e)
    rank = np.empty(begin[-1], np.int64)
    share = np.zeros(begin[-1], np.int64)
    load = split.load.copy()
    num_moved = 0
    to = 0
    for e in range(len(begin) - 1):
        pending = e == expert
        for c in range(split.begin[e], split.begin[e + 1]):
            # the holders of an expert stay in ascending order of ranks
            if pending and split.rank[c] > on:
                rank[to] = on
                pending = False
                to += 1
            if e == old and split.rank[c] == on:
                num_moved = split.share[c]
                continue
            rank[to] = split.rank[c]
            share[to] = split.share[c]
            to += 1
        if pending:
            rank[to] = on
            to += 1
    if old >= 0:
        # the least loaded of the other holders takes the tokens of the overwritten replica
        lowest = begin[old]
        for c in range(begin[old], begin[old + 1]):
            if load[rank[c]] < load[rank[lowest]]:
                lowest = c
        share[lowest] += num_moved
        load[on] -= num_moved
        load[rank[lowest]] += num_moved
    mean = -(-load.sum() // len(load))
    blocked = _augment(begin, rank, share, load, mean, True)
    _augment(begin, rank, share, load, mean, False)
    return Split(begin, rank, share, load, blocked)


@compiled
def _shared_by_rank(
    begin: np.ndarray, rank: np.ndarray, num_ranks: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """List the holders by rank, without experts that have a single holder.

    Returns:
        [R + 1] offsets by rank, the listed holders, and [C] the expert of every holder.
    """
    first = np.zeros(num_ranks + 1, np.int64)
    expert = np.empty(len(rank), np.int64)
    for e in range(len(begin) - 1):
        for c in range(begin[e], begin[e + 1]):
            expert[c] = e
            if begin[e + 1] - begin[e] > 1:
                first[rank[c] + 1] += 1
    for r in range(num_ranks):
        first[r + 1] += first[r]
    holder = np.empty(first[-1], np.int64)
    ends = first.copy()
    for c in range(len(rank)):
        if begin[expert[c] + 1] - begin[expert[c]] > 1:
            holder[ends[rank[c]]] = c
            ends[rank[c]] += 1
    return first, holder, expert


@compiled
def _augment(
    begin: np.ndarray, rank: np.ndarray, share: np.ndarray, load: np.ndarray, cap: int, rises: bool
) -> np.ndarray:
    """Move tokens, in place, until no rank is above the cap or no rank above it can lose more.

    Args:
        begin: see `Split`.
        rank: see `Split`.
        share: see `Split`; modified.
        load: see `Split`; modified.
        cap: tokens that a rank may have.
        rises: whether the cap rises to the mean of a closed set that is above it; otherwise the
            ranks of such a set stay above the cap.

    Returns:
        [R] bool, the closed set that raised the cap last.
    """
    num_ranks = len(load)
    first, holder, expert = _shared_by_rank(begin, rank, num_ranks)
    blocked = np.zeros(num_ranks, np.bool_)
    # number of the last search that reached the rank, and the expert
    rank_visit = np.full(num_ranks, -1)
    expert_visit = np.full(len(begin) - 1, -1)
    # on the path to a rank: the holder that gives tokens, and the rank's own that takes tokens
    gives = np.empty(num_ranks, np.int64)
    takes = np.empty(num_ranks, np.int64)
    queue = np.empty(num_ranks, np.int64)
    sinks = np.empty(num_ranks, np.int64)
    stuck = np.zeros(num_ranks, np.bool_)
    search = 0
    for source in range(num_ranks):
        while load[source] > cap and not stuck[source]:
            # The breadth-first search and the loop over sinks stay in this function: as compiled
            # functions of their own they take 3 to 30 % more time at 64 ranks.
            queue[0] = source
            head = 0
            tail = 1
            num_sinks = 0
            rank_visit[source] = search
            while head < tail and num_sinks == 0:
                r = queue[head]
                head += 1
                for i in range(first[r], first[r + 1]):
                    c = holder[i]
                    e = expert[c]
                    if expert_visit[e] == search or share[c] == 0:
                        continue
                    expert_visit[e] = search
                    for d in range(begin[e], begin[e + 1]):
                        to = rank[d]
                        if rank_visit[to] != search and not stuck[to]:
                            rank_visit[to] = search
                            gives[to] = c
                            takes[to] = d
                            queue[tail] = to
                            tail += 1
                            if load[to] < cap:
                                sinks[num_sinks] = to
                                num_sinks += 1
            search += 1
            if num_sinks == 0:
                if not rises:
                    # no path leaves this set, so no later path needs to enter it
                    for i in range(tail):
                        stuck[queue[i]] = True
                    break
                total = 0
                for i in range(tail):
                    total += load[queue[i]]
                cap = max(cap + 1, -(-total // tail))
                for r in range(num_ranks):
                    blocked[r] = rank_visit[r] == search - 1
            # fill the least loaded rank first
            for i in range(num_sinks):
                lowest = i
                for j in range(i + 1, num_sinks):
                    if load[sinks[j]] < load[sinks[lowest]]:
                        lowest = j
                sinks[i], sinks[lowest] = sinks[lowest], sinks[i]
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
    """Move tokens, in place, along a path to a rank with room, limited by every expert's tokens.

    Args:
        rank: see `Split`.
        share: see `Split`; modified.
        load: see `Split`; modified.
        ends: the overloaded rank, the rank with room, and the cap of both.
        gives: [R] on the path to a rank, the holder that gives tokens.
        takes: [R] on the path to a rank, the rank's own holder that takes the tokens.
    """
    source, sink, cap = ends
    amount = min(load[source] - cap, cap - load[sink])
    r = sink
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
