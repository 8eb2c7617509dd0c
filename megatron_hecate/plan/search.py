"""Which experts get replicas and where: a greedy fill that knows the nodes, and what a plan costs.

A plan is a table [R, P] of experts, as in a placement. Letters in shapes: E experts, R ranks, P physical slots of a
rank, K nodes. Tokens are those of a forecast, summed over the group.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from megatron_hecate.plan.maxflow import balance, compiled, holders_of

SLACK: int = 256  # the largest load of a forecast is known to one in so many of the mean
SCATTERED: int = 3  # receivers on a node from which they share the work of copying: the home sends its chunk once


class Problem(NamedTuple):
    """What plans are made for. Costs are those of `CopyCost`, in tokens.

    Args:
        home: [E] rank of each home.
        node: [R] node of each rank, from 0.
        members: [R] ranks by node.
        begin: [K + 1] where those of each node begin.
        bare: [R, P] table of the homes alone.
        scatters: as in `CopyCost`, and so are
        near, far, out, hidden, contention, routing, crossing: costs.
    """

    home: np.ndarray
    node: np.ndarray
    members: np.ndarray
    begin: np.ndarray
    bare: np.ndarray
    scatters: bool
    near: float
    far: float
    out: float
    hidden: float
    contention: float
    routing: float
    crossing: float


@compiled
def _counts(
    forecast: np.ndarray, home: np.ndarray, num_ranks: int, copies: int, leaving: int
) -> np.ndarray:
    """[E] replicas of each expert by tokens per holder (D'Hondt's method): ``copies`` in all, ``leaving`` of a home."""
    count, sent = np.zeros(len(forecast), np.int64), np.zeros(num_ranks, np.int64)
    heap = [(-forecast[e], e) for e in range(len(forecast)) if forecast[e] > 0]
    heapq.heapify(heap)
    while copies > 0 and len(heap) > 0:
        _, e = heapq.heappop(heap)
        if count[e] < num_ranks - 1 and sent[home[e]] < leaving:
            count[e] += 1
            sent[home[e]] += 1
            copies -= 1
            heapq.heappush(heap, (-forecast[e] / (count[e] + 1), e))
    return count


@compiled
def fill(forecast: np.ndarray, problem: Problem, number: int, leaving: int) -> np.ndarray:
    """Greedy plan: replicas by tokens per holder, the largest shares first, each to the least loaded rank with a slot.

    Nodes without the expert come first: there a replica serves tokens that would cross nodes. One that must be copied
    across nodes must be worth what is not hidden of that, in tokens that cross no more and in tokens that leave an
    overloaded node. Otherwise it goes to a node that has the expert, or nowhere.

    Args:
        forecast: [E] tokens.
        problem: homes, nodes and costs.
        number: replicas that a rank holds at most.
        leaving: replicas of one rank's experts at most.

    Returns:
        [R, P] table of homes and replicas.
    """
    home, node, members, begin = problem.home, problem.node, problem.members, problem.begin
    table, num_ranks, num_nodes = problem.bare.copy(), len(problem.bare), len(begin) - 1
    room = _room(table, number)
    count = _counts(forecast, home, num_ranks, room.sum(), leaving)
    share, load = forecast / (count + 1), np.zeros(num_ranks)
    for e in range(len(home)):
        load[home[e]] += share[e]
    mean, copied = forecast.sum() / num_ranks, np.zeros(num_nodes)
    # the least loaded rank with a slot of each node, and its load
    lowest, least = np.full(num_nodes, -1), np.full(num_nodes, np.inf)
    for k in range(num_nodes):
        lowest[k] = _least_loaded(members[begin[k] : begin[k + 1]], load, room)
        least[k] = load[lowest[k]] if lowest[k] >= 0 else np.inf
    order = np.argsort(least, kind="mergesort")
    there, holds = np.zeros(num_nodes, np.bool_), np.zeros(num_ranks, np.bool_)
    for e in np.argsort(-share):
        if count[e] == 0:
            continue
        there[:], holds[:] = False, False
        own = node[home[e]]
        there[own] = holds[home[e]] = True
        here, size = 0.0, begin[own + 1] - begin[own]
        for i in range(begin[own], begin[own + 1]):
            here += load[members[i]]
        crowd = here - mean * size
        for placed in range(count[e]):
            best = -1
            # tokens of replicas that have no place yet are still here
            relief = min(share[e], max(0.0, crowd + share[e] * (count[e] - placed)))
            for k in order:
                if lowest[k] < 0 or there[k]:
                    continue
                r, size = lowest[k], begin[k + 1] - begin[k]
                copying = (copied[k] + 1) * problem.far / (size if problem.scatters else 1)
                shown = problem.out if copying * problem.out > problem.hidden else 0.0
                shown += 1 - problem.out if copying * (1 - problem.out) > problem.hidden else 0.0
                if (
                    problem.crossing * forecast[e] * size / num_ranks + relief
                    >= shown * problem.far
                ):
                    best = r
                    break
            if best >= 0:
                copied[node[best]] += 1
            else:
                for k in range(num_nodes):
                    for i in range(begin[k], begin[k + 1] if there[k] else begin[k]):
                        r = members[i]
                        if not holds[r] and room[r] > 0 and (best < 0 or load[r] < load[best]):
                            best = r
            if best < 0:  # its holders serve more each
                for r in range(num_ranks):
                    load[r] += forecast[e] / (placed + 1) - share[e] if holds[r] else 0.0
                for k in range(num_nodes):
                    least[k] = load[lowest[k]] if lowest[k] >= 0 else np.inf
                order = np.argsort(least, kind="mergesort")
                break
            c = 0
            while table[best, c] >= 0:
                c += 1
            table[best, c] = e
            k, room[best] = node[best], room[best] - 1
            load[best] += share[e]
            there[k] = holds[best] = True
            lowest[k] = _least_loaded(members[begin[k] : begin[k + 1]], load, room)
            least[k] = load[lowest[k]] if lowest[k] >= 0 else np.inf
            _sort_in(order, least, k)
    return table


@compiled
def _sort_in(order: np.ndarray, least: np.ndarray, node: int) -> None:
    """Move one ``node`` in the ``order`` [K] of ascending ``least`` loads, then numbers, in place."""
    at = 0
    while order[at] != node:
        at += 1
    while at > 0 and (least[order[at - 1]], order[at - 1]) > (least[node], node):
        order[at], at = order[at - 1], at - 1
    while at + 1 < len(order) and (least[order[at + 1]], order[at + 1]) < (least[node], node):
        order[at], at = order[at + 1], at + 1
    order[at] = node


@compiled
def most_leaving(forecast: np.ndarray, problem: Problem, number: int) -> int:
    """Replicas of one rank's experts, of the rank with most of them, where `fill` does not limit them."""
    num_ranks = len(problem.bare)
    room = _room(problem.bare, number)
    count = _counts(forecast, problem.home, num_ranks, room.sum(), number * num_ranks)
    leaving = np.zeros(num_ranks, np.int64)
    for e in range(len(count)):
        leaving[problem.home[e]] += count[e]
    return int(max(leaving))


@compiled
def _room(table: np.ndarray, number: int) -> np.ndarray:
    """[R] empty slots of each rank, ``number`` at most."""
    room = np.zeros(len(table), np.int64)
    for r in range(len(table)):
        for c in range(table.shape[1]):
            room[r] += 1 if table[r, c] < 0 and room[r] < number else 0
    return room


@compiled
def _least_loaded(ranks: np.ndarray, load: np.ndarray, room: np.ndarray) -> int:
    """Of ``ranks`` with room, or -1."""
    best = -1
    for r in ranks:
        if room[r] > 0 and (best < 0 or load[r] < load[best]):
            best = r
    return best


@compiled
def plan_cost(
    forecast: np.ndarray, problem: Problem, table: np.ndarray, bound: float
) -> tuple[float, float]:
    """What a plan costs in tokens of the busiest rank: in all, and the part of copies and routing.

    Where even a perfect balance leaves ``bound`` or more, that is returned: balancing takes most of the time.
    """
    crossing, overhead = cost_beside_load(forecast, problem, table)
    mean, whole = forecast.sum() / len(table), np.empty(len(forecast), np.int64)
    if mean + crossing + overhead >= bound:
        return mean + crossing + overhead, overhead
    for e in range(len(forecast)):
        whole[e] = int(forecast[e] + 0.5)
    largest = max(balance(whole, table, int(mean / SLACK), False).load)
    return largest + crossing + overhead, overhead


@compiled
def cost_beside_load(
    forecast: np.ndarray, problem: Problem, table: np.ndarray
) -> tuple[float, float]:
    """Tokens that cross nodes, of the busiest node, and copies and routing, both in tokens of the busiest rank."""
    home, node, num_ranks, num_nodes = (
        problem.home,
        problem.node,
        len(table),
        len(problem.begin) - 1,
    )
    begin, rank = holders_of(len(home), table)
    # of each node: ranks, holders of an expert, tokens that leave and arrive, copies that do; of ranks: copies
    size, held = np.diff(problem.begin), np.zeros(num_nodes)
    leaves, arrives = np.zeros(num_nodes), np.zeros(num_nodes)
    copies_out, copies_in = np.zeros(num_nodes), np.zeros(num_nodes)
    sent, received = np.zeros(num_ranks), np.zeros(num_ranks)
    total = forecast.sum()
    for k in range(num_nodes):  # as if no node held an expert
        leaves[k] = total * size[k] / num_ranks
    for e in range(len(home)):
        holders, own, elsewhere = rank[begin[e] : begin[e + 1]], node[home[e]], num_ranks
        for r in holders:
            held[node[r]] = 0
        for r in holders:
            k = node[r]
            received[r] += 1 if r != home[e] else 0
            if held[k] == 0:
                elsewhere -= size[k]
                leaves[k] -= forecast[e] * size[k] / num_ranks
                copies_in[k] += 1 if k != own else 0
                copies_out[own] += 1 if k != own else 0
            held[k] += 1
        crossing = forecast[e] * elsewhere / num_ranks
        for r in holders:
            arrives[node[r]] += crossing / len(holders)
        if problem.scatters:
            sent[home[e]] += 1 if held[own] > SCATTERED else held[own] - 1
        else:  # over the slowest link, one after another
            sent[home[e]] += len(holders) - 1
    crossing = between = 0.0
    for k in range(num_nodes):
        crossing = max(crossing, problem.crossing * max(leaves[k], arrives[k]) / size[k])
        between = max(between, problem.far * max(copies_in[k], copies_out[k]) / size[k])
    if max(received) == 0:
        return crossing, 0.0
    copying = max(between, problem.near * max(max(received), max(sent)))
    if not problem.scatters and num_nodes > 1:
        copying = problem.far * max(max(received), max(sent))
    hidden = min(copying * problem.out, problem.hidden) + min(
        copying * (1 - problem.out), problem.hidden
    )
    return crossing, copying - hidden + problem.contention * hidden + problem.routing
