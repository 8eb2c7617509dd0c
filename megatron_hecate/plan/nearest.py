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

from megatron_hecate.plan.compiled import compiled
from megatron_hecate.plan.graph import CROSSING, Graph
from megatron_hecate.plan.origin import Origin

FAR: int = 1 << 60  # beyond any price or label
MOST: int = (1 << 63) - 1  # tokens that may pass a joint


@compiled
def bring_below(cap: int, graph: Graph, origin: Origin, flow: np.ndarray, load: np.ndarray) -> None:
    """Move tokens, in place, until no rank serves more than ``cap``, at the least cost; a cap that `level` found.

    ``flow`` [R * P + G] tokens through each joint and ``load`` [R] on each rank: any split at least cost without a cap.
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
    heap = np.empty(len(to) + 1, np.int64)
    arc = np.empty(size, np.int64)  # the next one to try
    queue = np.empty(size, np.int64)  # a ring of the vertices that have too much
    head, waiting = 0, 0
    for r in range(num_ranks):
        if excess[r] > 0:
            queue[waiting] = r
            waiting += 1
    while waiting > 0:
        _relabel(num_ranks, leaves, to, twin, price, excess, label, delta, heap, stack, waiting)
        arc[:] = leaves[:-1]
        patience = max(10, size // 4)  # labels to change before they are made exact again
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
                    assert least < FAR  # the cap can be reached
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


@compiled
def _on(passed: int, free: int, near: int, fee: int, cross: int) -> int:
    """What one more token through a joint costs."""
    return 0 if passed < free else fee if passed < near else cross


@compiled
def _back(passed: int, free: int, near: int, fee: int, cross: int) -> int:
    """What one token less costs."""
    return -cross if passed > near else -fee if passed > free else 0 if passed > 0 else FAR


@compiled
def _relabel(
    num_ranks: int,
    leaves: np.ndarray,
    to: np.ndarray,
    twin: np.ndarray,
    price: np.ndarray,
    excess: np.ndarray,
    label: np.ndarray,
    delta: np.ndarray,
    heap: np.ndarray,
    stack: np.ndarray,
    waiting: int,
) -> None:
    """Raise labels, in place, to what they bound, as far as the ``waiting`` vertices with too much need it.

    ``delta``, ``heap`` and ``stack`` are room to work in.
    """
    size = len(leaves) - 1
    delta[:] = FAR  # what is missing from each label
    top, heaped, now = 0, 0, 0
    for r in range(num_ranks):
        if excess[r] < 0:
            delta[r] = 0
            stack[top] = r
            top += 1
    while True:
        if top > 0:
            top -= 1
            w = stack[top]
        else:
            now = -1
            while now < 0:
                assert heaped > 0  # the cap can be reached
                far, w = heap[0] // size, heap[0] % size
                heaped = _pop(heap, heaped)
                if far == delta[w]:
                    now = far
        if excess[w] > 0:
            waiting -= 1
            if waiting == 0:
                break
        for b in range(leaves[w], leaves[w + 1]):
            v, fee = to[b], price[twin[b]]
            if delta[v] <= now or fee == FAR:
                continue
            far = delta[w] + label[w] + 1 + fee - label[v]
            if far < delta[v]:
                delta[v] = far
                if far == now:
                    stack[top] = v
                    top += 1
                else:
                    heaped = _push(heap, heaped, far * size + v)
    for v in range(size):
        label[v] += min(now, delta[v])


@compiled
def _push(heap: np.ndarray, size: int, key: int) -> int:
    """Add ``key`` to the binary heap of ``size`` keys; the new size."""
    at = size
    while at > 0 and heap[(at - 1) >> 1] > key:
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap[at] = key
    return size + 1


@compiled
def _pop(heap: np.ndarray, size: int) -> int:
    """Take the least key out; the new size."""
    size -= 1
    key = heap[size]
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = key
    return size
