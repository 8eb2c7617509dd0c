"""Which holder serves whom, close by: the compiled core of quotas that decides where tokens travel.

Among all splits in which no rank computes more than ``cap`` tokens, the one that sends fewest tokens across nodes and,
of those, fewest to another rank: a minimum-cost flow. A token costs what it costs to move:

    rank --- group (expert, node) --- expert
         1 if not its own          CROSSING - 1 more if not its own node's

Moving tokens back earns the same. The method is the primal-dual one (Ahuja, Magnanti, Orlin, "Network Flows", section
9.8), from the split that is nearest when nobody counts ranks' loads (`origin.start`): find how dear the cheapest way
from a rank above the cap to one below is (Dijkstra's search, on prices that potentials reduce to 0 or more), then move
tokens along all ways that are just so dear. The search ends at the first rank with room, so most of it is short.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.compiled import compiled
from megatron_hecate.plan.graph import CROSSING, Graph
from megatron_hecate.plan.origin import Origin

FAR: int = 1 << 60


@compiled
def bring_below(cap: int, graph: Graph, origin: Origin, flow: np.ndarray, load: np.ndarray) -> None:
    """Move tokens, in place, until no rank serves more than ``cap``, at the least cost; a cap that `level` found.

    ``flow`` [R * P + G] tokens through each joint and ``load`` [R] on each rank: any split at least cost without a cap.
    """
    num_ranks, num_slots, num_groups = len(load), len(graph.table), len(graph.group_begin)
    leaves, to, joint = graph.leaves, graph.to, graph.joint
    size = len(leaves) - 1
    # up to `free[j]` tokens pass joint j for nothing, others at `fee[j]`
    free = np.concatenate((origin.own, origin.near))
    fee = np.empty(num_slots + num_groups, np.int64)
    fee[:num_slots] = 1
    fee[num_slots:] = CROSSING - 1
    # the start is optimal without a cap; with these potentials no arc of it has a negative reduced price
    potential = np.zeros(size, np.int64)
    potential[num_ranks : num_ranks + num_groups] = -1
    potential[num_ranks + num_groups :] = -CROSSING
    distance = np.empty(size, np.int64)
    done = np.empty(size, np.bool_)
    heap = np.empty(len(to) + 1, np.int64)  # distance * size + vertex
    hop = np.empty(size, np.int64)
    queue = np.empty(size, np.int64)
    arc = np.empty(size, np.int64)  # the next one to try
    path = np.empty(size, np.int64)  # arcs
    while True:
        # breadth first along arcs without a reduced price, from all ranks above the cap to the nearest with room
        hop[:] = -1
        tail = 0
        for r in range(num_ranks):
            if load[r] > cap:
                hop[r] = 0
                arc[r] = leaves[r]
                queue[tail] = r
                tail += 1
        if tail == 0:
            break
        sources, head, found = tail, 0, size
        while head < tail and hop[queue[head]] < 2 * found:
            v = queue[head]
            head += 1
            for a in range(leaves[v], leaves[v + 1]):
                w, j = to[a], joint[a]
                if hop[w] >= 0:
                    continue
                if j >= 0:
                    if flow[j] == 0:
                        continue
                    price = -fee[j] if flow[j] > free[j] else 0
                else:
                    price = 0 if flow[~j] < free[~j] else fee[~j]
                if price + potential[v] == potential[w]:
                    hop[w] = hop[v] + 1
                    arc[w] = leaves[w]
                    queue[tail] = w
                    tail += 1
                    if w < num_ranks and load[w] < cap:
                        found = min(found, hop[w])
        if found == size:
            # no more such ways: on from here by distance, until a rank with room is the nearest vertex left
            distance[:] = FAR
            done[:] = False
            for i in range(tail):
                distance[queue[i]] = 0
                done[queue[i]] = True
            head, heaped, now = 0, 0, 0
            while True:
                if head < tail:
                    v = queue[head]
                else:
                    while heaped > 0 and done[heap[0] % size]:
                        heaped = _pop(heap, heaped)
                    assert heaped > 0  # the cap can be reached
                    now, v = heap[0] // size, heap[0] % size
                    heaped = _pop(heap, heaped)
                    if v < num_ranks and load[v] < cap:
                        break
                    done[v] = True
                    queue[tail] = v
                    tail += 1
                head += 1
                for a in range(leaves[v], leaves[v + 1]):
                    w, j = to[a], joint[a]
                    if done[w]:
                        continue
                    if j >= 0:
                        if flow[j] == 0:
                            continue
                        price = -fee[j] if flow[j] > free[j] else 0
                    else:
                        price = 0 if flow[~j] < free[~j] else fee[~j]
                    far = now + price + potential[v] - potential[w]
                    if far < distance[w]:
                        distance[w] = far
                        heaped = _push(heap, heaped, far * size + w)
            for i in range(tail):
                potential[queue[i]] += distance[queue[i]] - now
            continue
        # depth first, one hop farther with each arc; vertices from which there is no way are not asked again
        for i in range(sources):
            start = queue[i]
            while load[start] > cap:
                top, v = 0, start
                while v >= num_ranks or load[v] >= cap:
                    while arc[v] < leaves[v + 1]:
                        a = arc[v]
                        w, j = to[a], joint[a]
                        if hop[w] == hop[v] + 1:
                            if j >= 0:
                                price = -fee[j] if flow[j] > free[j] else 0
                                if flow[j] > 0 and price + potential[v] == potential[w]:
                                    break
                            else:
                                price = 0 if flow[~j] < free[~j] else fee[~j]
                                if price + potential[v] == potential[w]:
                                    break
                        arc[v] += 1
                    if arc[v] < leaves[v + 1]:
                        path[top] = arc[v]
                        top += 1
                        v = to[arc[v]]
                    elif top == 0:
                        break
                    else:
                        top -= 1
                        v = start if top == 0 else to[path[top - 1]]
                        arc[v] += 1
                if v == start:
                    break
                amount = min(load[start] - cap, cap - load[v])
                for k in range(top):
                    j = joint[path[k]]
                    if j >= 0:
                        amount = min(amount, flow[j] - free[j] if flow[j] > free[j] else flow[j])
                    elif flow[~j] < free[~j]:
                        amount = min(amount, free[~j] - flow[~j])
                for k in range(top):
                    j = joint[path[k]]
                    if j >= 0:
                        flow[j] -= amount
                    else:
                        flow[~j] += amount
                load[start] -= amount
                load[v] += amount


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
