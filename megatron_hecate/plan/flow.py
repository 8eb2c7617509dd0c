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
that set``, whose maximum is the smallest possible largest rank load. The flow is found by pushing and relabelling
(Goldberg and Tarjan, "A New Approach to the Maximum-Flow Problem", 1988): ranks and experts are labelled with at most
what the shortest way to a rank with room takes, tokens above the cap go where labels fall, and a label is raised when
nobody is left to take them. Labels become exact every so often (`measure`), in small graphs instead of being raised.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled
from megatron_hecate.plan.links import Links

NO_LIMIT: int = 1 << 62
FAR: int = 1 << 30  # the label of what tokens cannot leave
SMALL: int = 64  # up to so many ranks, exact labels cost less than raising them one by one


@compiled
def level(
    links: Links,
    table: np.ndarray,
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
    enough. When the optimum is above ``most``, stop as soon as that is known, and in any case after so many ``rounds``
    (times that labels are made exact).
    A ``patient`` search first moves all that can get to the mean, or ``enough``, however high the optimum is.

    Returns:
        The optimum (``enough``, if that is larger), or something above ``most``. ``visited`` [R] then marks a
        set of ranks that explains a largest load above the mean: their tokens cannot leave it.
    """
    slot, rank, expert, begin, first, by_rank = links
    num_ranks, num_shared = len(load), len(begin) - 1
    spare = np.empty(len(slot), np.int64)  # tokens that may leave by each link
    for i in range(len(slot)):
        spare[i] = served[slot[i]] - least[table[slot[i]]]
    visited[:] = False
    cap = max(enough, -(-load.sum() // num_ranks))
    hops, near = np.empty(num_ranks, np.int64), np.empty(num_shared, np.int64)  # labels of ranks and experts
    arc, turn = np.empty(num_ranks, np.int64), np.empty(num_shared, np.int64)  # the next link, the next holder to try
    queue = np.empty(num_ranks, np.int64)  # a ring of the ranks above the cap
    result = NO_LIMIT
    for _ in range(rounds):
        above = measure(links, spare, load, cap, hops, near, queue)
        if above == 0:
            result = cap
            break
        head, waiting = 0, 0
        for r in range(num_ranks):
            if load[r] > cap and hops[r] < FAR:
                queue[waiting] = r
                waiting += 1
        if waiting < above and (waiting == 0 or not patient):
            cap = _confined(links, spare, load, cap, hops, queue, visited)
            if cap > most:
                result = cap
                break
            continue
        arc[:] = first[:num_ranks]
        turn[:] = begin[:num_shared]
        patience = num_ranks // 2 if num_ranks > SMALL else 0  # labels to change before they are made exact again
        while waiting > 0:
            a = queue[head]
            head = head + 1 if head + 1 < num_ranks else 0
            waiting -= 1
            excess = load[a] - cap
            while excess > 0:
                at = arc[a]
                if at == first[a + 1]:
                    if patience == 0:
                        break
                    nearest = FAR
                    for k in range(first[a], at):
                        if spare[by_rank[k]] > 0:
                            nearest = min(nearest, near[expert[by_rank[k]]])
                    patience -= 1
                    hops[a] = min(FAR, nearest + 1)
                    arc[a] = first[a]
                    if hops[a] == FAR:
                        break
                    continue
                i = by_rank[at]
                x = expert[i]
                if spare[i] == 0 or near[x] + 1 != hops[a]:
                    arc[a] += 1
                    continue
                j = turn[x]
                if j == begin[x + 1]:
                    nearest = FAR
                    if patience > 0:
                        for k in range(begin[x], j):
                            nearest = min(nearest, hops[rank[k]])
                        patience -= 1
                    near[x] = nearest
                    turn[x] = begin[x]
                    continue
                b = rank[j]
                if hops[b] != near[x]:
                    turn[x] += 1
                    continue
                amount, room = min(excess, spare[i]), cap - load[b]
                if hops[b] == 0:
                    if room == 0:
                        hops[b] = 1
                        continue
                    amount = min(amount, room)
                elif room == 0:
                    at = head + waiting
                    queue[at if at < num_ranks else at - num_ranks] = b
                    waiting += 1
                spare[i] -= amount
                spare[j] += amount
                load[b] += amount
                excess -= amount
            load[a] = cap + excess
    for i in range(len(slot)):
        served[slot[i]] = spare[i] + least[table[slot[i]]]
    return result


@borrowing
def measure(
    links: Links, spare: np.ndarray, load: np.ndarray, cap: int, hops: np.ndarray, near: np.ndarray, queue: np.ndarray
) -> int:
    """Make labels exact, as far as there are ranks above the cap; how many of these there are.

    ``hops`` [R] from each rank to one with room, ``near`` [X] the least of an expert's holders; those farther than all
    ranks above the cap are labelled as the next ones, those from which tokens cannot get there ``FAR``. ``queue`` is
    room to work in.
    """
    num_ranks = len(load)
    near[:] = FAR
    found, above = 0, 0
    for r in range(num_ranks):
        hops[r] = FAR
        if load[r] < cap:
            hops[r] = 0
            queue[found] = r
            found += 1
        elif load[r] > cap:
            above += 1
    head, far, blocked = 0, 0, above
    while head < found and blocked > 0:
        b = queue[head]
        head += 1
        far = hops[b] + 1
        for at in range(links.first[b], links.first[b + 1]):
            x = links.expert[links.by_rank[at]]
            if near[x] < FAR:
                continue
            near[x] = far - 1
            for i in range(links.begin[x], links.begin[x + 1]):
                a = links.rank[i]
                if hops[a] == FAR and spare[i] > 0:
                    hops[a] = far
                    queue[found] = a
                    found += 1
                    blocked -= load[a] > cap
    if blocked == 0:
        for r in range(num_ranks):
            hops[r] = min(hops[r], far)
        for x in range(len(near)):
            near[x] = min(near[x], far - 1)
    return above


@compiled
def _confined(
    links: Links,
    spare: np.ndarray,
    load: np.ndarray,
    cap: int,
    hops: np.ndarray,
    queue: np.ndarray,
    visited: np.ndarray,
) -> int:
    """The largest mean load, rounded up, of the parts that blocked ranks and those they reach fall into.

    Ranks are in one part when an expert passes tokens between them. ``visited`` marks the part; ``queue`` is room
    to work in.
    """
    part = np.arange(len(load))  # a rank of the same part, nearer to its first
    seen = np.zeros(len(links.begin) - 1, np.bool_)
    visited[:] = False
    tail = 0
    for r in range(len(load)):
        if load[r] > cap and hops[r] == FAR:
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
            a = first_of(part, r)
            for j in range(links.begin[x], links.begin[x + 1]):
                if not visited[links.rank[j]]:
                    visited[links.rank[j]] = True
                    queue[tail] = links.rank[j]
                    tail += 1
                a = join(part, a, links.rank[j])
    total, ranks = np.zeros(len(load), np.int64), np.zeros(len(load), np.int64)
    for r in queue[:tail]:
        total[first_of(part, r)] += load[r]
        ranks[first_of(part, r)] += 1
    cap, fullest = 0, 0
    for r in range(len(load)):
        if ranks[r] > 0 and -(-total[r] // ranks[r]) > cap:
            cap, fullest = -(-total[r] // ranks[r]), r
    for r in queue[:tail]:
        visited[r] = first_of(part, r) == fullest
    return cap


@borrowing
def join(part: np.ndarray, first: int, rank: int) -> int:
    """Make ``rank``'s part one with that of which ``first`` is the first rank, or none if -1; the first of both."""
    other = first_of(part, rank)
    if first < 0:
        return other
    part[max(first, other)] = min(first, other)
    return min(first, other)


@borrowing
def first_of(part: np.ndarray, rank: int) -> int:
    """The first rank of the part that ``rank`` belongs to."""
    while part[rank] != rank:
        part[rank] = part[part[rank]]
        rank = part[rank]
    return rank
