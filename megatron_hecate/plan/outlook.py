"""What a late guest can win at most, before any is solved: where the tokens of a blocked set would find room.

A late guest joins the blocked set with one rank outside. What that rank has no room for it can pass on, over experts
that it shares with others, and these to others: its *part*. One search for all guests that are looked at bounds what
`flow.level` finds for each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled
from megatron_hecate.plan.flow import FAR, first_of, join, measure
from megatron_hecate.plan.links import Links


class Outlook(NamedTuple):
    """A blocked set, and the parts that all ranks fall into.

    Args:
        part: [R] the first rank of each rank's part; what a part has counts there.
        ranks: [R] of each part; 0 for that of the blocked set.
        tokens: [R] that these serve.
        room: [R] tokens that they can take until all of them serve the mean; 0 where no room can be reached.
        leaks: [R] whether they can pass tokens to ranks that are blocked, too.
        mean: mean rank load, rounded down.
        caught: tokens in the blocked set.
        size: ranks of that set.
        confined: tokens above the mean in that set and in those that can pass theirs to it.
        others: the least that other blocked sets leave as the largest rank load; ``mean`` without any.
        excess: tokens above the mean on all ranks.
    """

    part: np.ndarray
    ranks: np.ndarray
    tokens: np.ndarray
    room: np.ndarray
    leaks: np.ndarray
    mean: int
    caught: int
    size: int
    confined: int
    others: int
    excess: int


@compiled
def outlook(links: Links, served: np.ndarray, load: np.ndarray, inside: np.ndarray, mean: int) -> Outlook:
    """Of ranks ``inside`` [R] a blocked set, where all that could get to the mean is there (`flow.level`, patient)."""
    num_ranks, num_shared = len(load), len(links.begin) - 1
    hops, queue = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    spare = served[links.slot]
    measure(links, spare, load, mean, hops, np.empty(num_shared, np.int64), queue)
    part = np.arange(num_ranks)
    leaks = np.zeros(num_ranks, np.bool_)
    for x in range(num_shared):
        # can blocked ranks send this expert's tokens? Then all its holders are blocked
        closed = shut = False
        for i in range(links.begin[x], links.begin[x + 1]):
            shut |= hops[links.rank[i]] == FAR
            closed |= spare[i] > 0 and hops[links.rank[i]] == FAR
        a = -1
        for i in range(links.begin[x], links.begin[x + 1]):
            if closed or hops[links.rank[i]] < FAR:
                leaks[links.rank[i]] |= shut and not closed
                a = join(part, a, links.rank[i])
    ranks, tokens, room = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    caught, size, confined, others = 0, 0, 0, mean
    for r in range(num_ranks):
        p = part[r] = first_of(part, r)
        ranks[p] += 1
        tokens[p] += load[r]
        leaks[p] |= leaks[r]
        room[p] += max(0, mean - load[r])
        if inside[r]:
            caught += load[r]
            size += 1
    for r in range(num_ranks):
        if inside[r]:
            ranks[part[r]] = 0
    for r in range(num_ranks):
        p = part[r]
        if ranks[p] == 0:
            confined += load[r] - mean
        else:  # where tokens can leave, no more than the mean is left
            others = max(others, -(-tokens[p] // ranks[p]))
    return Outlook(part, ranks, tokens, room, leaks, mean, caught, size, confined, others, above(load, mean))


@borrowing
def hope(ahead: Outlook, rank: int, movable: int) -> tuple[int, int]:
    """What is left at least if the blocked set could send so many of its tokens to this rank outside.

    Returns:
        The largest rank load, never more than there will be; and tokens above the mean on all ranks, which may be one
        per rank too many, since the mean is rounded.
    """
    part = ahead.part[rank]
    left = ahead.excess - min(movable, ahead.room[part], ahead.confined)
    largest = max(ahead.mean, -(-(ahead.caught - movable) // ahead.size))
    if ahead.room[part] > 0:
        largest = max(largest, ahead.others)
        if not ahead.leaks[part]:
            together = -(-(ahead.caught + ahead.tokens[part]) // (ahead.size + ahead.ranks[part]))
            largest = max(largest, together)
    return largest, left


@borrowing
def above(load: np.ndarray, mean: int) -> int:
    """Tokens above the mean, over all ranks."""
    excess = 0
    for tokens in load:
        excess += max(0, tokens - mean)
    return excess
