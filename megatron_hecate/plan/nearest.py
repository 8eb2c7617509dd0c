"""Which holder serves whom, close by: the compiled core of quotas that decides where tokens travel.

Among all splits in which no rank computes more than ``cap`` tokens, the one that sends fewest tokens across nodes and,
of those, fewest to another rank: a minimum-cost flow. A token costs what it costs to move:

    rank --- group (expert, node) --- expert
         1 if not its own          CROSSING - 1 more if not its own node's

Moving tokens back earns the same. The method pushes and relabels (Goldberg and Tarjan, "Finding Minimum-Cost
Circulations by Successive Approximation", 1990), from a split that is nearest when nobody counts ranks' loads
(`origin.start`). A vertex is labelled with at most what the cheapest way from it to a rank with room costs, hops added;
a vertex that has too much pushes along ways on which that cannot be bettered, and is relabelled when there is none.
Tokens count ``scale`` times as much as a hop, more hops than any way has, so the result is exact. Labels become exact
every so often (Dijkstra's search, back from all ranks with room); two to ten times are enough for most loads.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled
from megatron_hecate.plan.graph import CROSSING, Graph
from megatron_hecate.plan.origin import Origin

FAR: int = 1 << 60  # beyond any price or label
MOST: int = (1 << 63) - 1  # tokens that may pass a joint
WINDOW: int = 64  # distances that have a list each, a power of 2


@compiled
def bring_below(cap: int, graph: Graph, origin: Origin, flow: np.ndarray, load: np.ndarray) -> bool:
    """Move tokens, in place, until no rank serves more than ``cap``, at the least cost.

    ``flow`` [R * P + G] tokens through each joint and ``load`` [R] on each rank: any split at least cost without a cap.

    Returns:
        Whether that is possible; if not, ``flow`` is of no use any more.
    """
    num_ranks, num_slots = len(load), len(graph.table)
    leaves, to, twin, joint = graph.leaves, graph.to, graph.twin, graph.joint
    size = len(leaves) - 1
    scale = size + 2
    # the first `free[j]` tokens pass joint j for nothing, those up to `near[j]` at `fee[j]`, others at `cross`
    free = np.concatenate((origin.own, origin.near))
    near = np.full(len(free), MOST, np.int64)
    fee = np.empty(len(free), np.int64)
    fee[:num_slots] = scale
    fee[num_slots:] = (CROSSING - 1) * scale
    cross = CROSSING * scale
    for c in range(num_slots):
        if graph.alone[c] >= 0:
            near[c] = origin.near[graph.alone[c]]
    price = np.empty(len(to), np.int64)  # of one more token along each arc; FAR when there is none to move
    for a in range(len(to)):
        j = joint[a]
        if j >= 0:
            price[a] = _back(flow[j], free[j], near[j], fee[j], cross)
        else:
            price[a] = _on(flow[~j], free[~j], near[~j], fee[~j], cross)
    label = graph.height * scale  # the start is optimal without a cap: with these no arc wins anything
    excess = np.zeros(size, np.int64)
    excess[:num_ranks] = load - cap
    delta, stack = np.empty(size, np.int64), np.empty(size, np.int64)
    ring, entry = np.empty(WINDOW, np.int64), np.empty((len(to), 3), np.int64)
    arc = np.empty(size, np.int64)  # the next one to try
    queue = np.empty(size, np.int64)  # a ring of the vertices that have too much
    head, waiting = 0, 0
    for r in range(num_ranks):
        if excess[r] > 0:
            queue[waiting] = r
            waiting += 1
    while waiting > 0:
        if not _relabel(num_ranks, leaves, to, twin, price, excess, label, delta, stack, ring, entry, waiting):
            return False
        arc[:] = leaves[:-1]
        patience = max(10, size // 2)  # labels to change before they are made exact again
        while waiting > 0 and patience >= 0:
            v = queue[head]
            head = head + 1 if head + 1 < size else 0
            waiting -= 1
            while excess[v] > 0:
                a = arc[v]
                if a == leaves[v + 1]:
                    least = FAR
                    for b in range(leaves[v], leaves[v + 1]):
                        if price[b] + label[to[b]] < least:
                            least = price[b] + label[to[b]]
                            arc[v] = b
                    if least >= FAR:  # unreachable
                        return False
                    label[v] = least + 1
                    patience -= 1
                    continue
                w, j = to[a], joint[a]
                if price[a] + 1 + label[w] != label[v]:
                    arc[v] += 1
                    continue
                amount = excess[v]
                if j >= 0:
                    passed = flow[j]
                    floor = near[j] if passed > near[j] else free[j] if passed > free[j] else 0
                    amount = min(amount, passed - floor)
                    passed -= amount
                    price[a] = _back(passed, free[j], near[j], fee[j], cross)
                    price[twin[a]] = _on(passed, free[j], near[j], fee[j], cross)
                else:
                    j = ~j
                    passed = flow[j]
                    ceiling = free[j] if passed < free[j] else near[j] if passed < near[j] else MOST
                    amount = min(amount, ceiling - passed)
                    passed += amount
                    price[a] = _on(passed, free[j], near[j], fee[j], cross)
                    price[twin[a]] = _back(passed, free[j], near[j], fee[j], cross)
                flow[j] = passed
                excess[v] -= amount
                if excess[w] <= 0 and excess[w] + amount > 0:
                    at = head + waiting
                    queue[at if at < size else at - size] = w
                    waiting += 1
                excess[w] += amount
    load[:] = excess[:num_ranks] + cap
    return True


@borrowing
def _on(passed: int, free: int, near: int, fee: int, cross: int) -> int:
    """What one more token through a joint costs."""
    return 0 if passed < free else fee if passed < near else cross


@borrowing
def _back(passed: int, free: int, near: int, fee: int, cross: int) -> int:
    """What one token less costs."""
    return -cross if passed > near else -fee if passed > free else 0 if passed > 0 else FAR


@borrowing
def _relabel(
    num_ranks: int,
    leaves: np.ndarray,
    to: np.ndarray,
    twin: np.ndarray,
    price: np.ndarray,
    excess: np.ndarray,
    label: np.ndarray,
    delta: np.ndarray,
    stack: np.ndarray,
    ring: np.ndarray,
    entry: np.ndarray,
    waiting: int,
) -> bool:
    """Raise labels, in place, to what they bound, as far as the ``waiting`` vertices with too much need it.

    Vertices come by what their labels lack, in two levels of buckets (Dial, "Algorithm 360", 1969): the next ``WINDOW``
    distances have a list each, all others one together. Distances differ by a few hops or by many, so that one is
    seldom searched. ``delta`` and ``stack`` [V], ``ring`` [WINDOW] and ``entry`` [A, 3] are room to work in.
    """
    size = len(leaves) - 1
    delta[:] = FAR  # what is missing from each label
    ring[:] = -1  # the first entry of each list; an entry is a vertex, its distance and the next entry
    top, entries, now, last = 0, 0, 0, 0  # the ring holds distances from now + 1 to last, less than now + WINDOW,
    later, soonest = -1, FAR  # and the other list some from `soonest` on
    for r in range(num_ranks):
        if excess[r] < 0:
            delta[r] = 0
            stack[top] = r
            top += 1
    while True:
        while top == 0:
            far = now + 1
            while far <= last and ring[far & (WINDOW - 1)] < 0:
                far += 1
            if far <= last and far < soonest:
                i = ring[far & (WINDOW - 1)]
                ring[far & (WINDOW - 1)] = -1
                while i >= 0:
                    if delta[entry[i, 0]] == far:
                        stack[top] = entry[i, 0]
                        top += 1
                    i = entry[i, 2]
                now = far
                continue
            if later < 0:
                return False
            if far > last:
                now = last = soonest - 1
            i, later, soonest = later, -1, FAR
            while i >= 0:
                following, far = entry[i, 2], entry[i, 1]
                if far < now + WINDOW:
                    last = max(last, far)
                    entry[i, 2], ring[far & (WINDOW - 1)] = ring[far & (WINDOW - 1)], i
                elif far == delta[entry[i, 0]]:
                    soonest = min(soonest, far)
                    entry[i, 2], later = later, i
                i = following
        top -= 1
        w = stack[top]
        if excess[w] > 0:
            waiting -= 1
            if waiting == 0:
                break
        for b in range(leaves[w], leaves[w + 1]):
            v, fee = to[b], price[twin[b]]
            if delta[v] <= now or fee == FAR:
                continue
            far = now + label[w] + 1 + fee - label[v]
            if far < delta[v]:
                delta[v] = far
                if far == now:
                    stack[top] = v
                    top += 1
                    continue
                entry[entries, 0], entry[entries, 1] = v, far
                if far < now + WINDOW:
                    last = max(last, far)
                    entry[entries, 2], ring[far & (WINDOW - 1)] = ring[far & (WINDOW - 1)], entries
                else:
                    soonest = min(soonest, far)
                    entry[entries, 2], later = later, entries
                entries += 1
    for v in range(size):
        label[v] += min(now, delta[v])
    return True
