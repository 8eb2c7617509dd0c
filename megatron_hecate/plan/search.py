"""Greedy, topology-aware fill of the replica slots, and the cost of a plan.

A plan is a table [R, P] of experts, as in a placement. Letters in shapes: E experts, R ranks, P
physical slots of a rank, K nodes. All token counts are a forecast, summed over the group.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from megatron_hecate.plan.maxflow import balance, compiled, holders_of

# the largest load of a forecast is computed to 1/256 of the mean
SLACK: int = 256
# Receivers on a node from which on they share the copying: the home sends its chunk once.
SCATTERED: int = 3
# Cost of a token above the limit of a rank load, in tokens: more than any number of copies.
OVERFLOW: float = 1e6


class Problem(NamedTuple):
    """Input of the search: homes, nodes and costs.

    Args:
        home: [E] home rank of each expert.
        node: [R] node of each rank, from 0.
        members: [R] ranks, sorted by node.
        begin: [K + 1] offset of each node's ranks in ``members``.
        bare: [R, P] table of the homes alone.
        scatters: flag of `CopyCost`.
        near, far, out, hidden, contention, routing, computing, crossing: costs of `CopyCost`, in
            tokens.
        limit: tokens of a rank above which each costs `OVERFLOW`.
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
    computing: float
    crossing: float
    limit: float


@compiled
def _counts(
    forecast: np.ndarray, home: np.ndarray, num_ranks: int, copies: int, leaving: int
) -> np.ndarray:
    """Choose the number of replicas of each expert by tokens per holder (D'Hondt's method).

    Args:
        forecast: [E] tokens.
        home: [E] home ranks.
        num_ranks: R.
        copies: limit for all replicas together.
        leaving: limit for replicas of one rank's home experts.

    Returns:
        [E] int64 replicas.
    """
    count = np.zeros(len(forecast), np.int64)
    sends = np.zeros(num_ranks, np.int64)
    heap = [(-forecast[e], e) for e in range(len(forecast)) if forecast[e] > 0]
    heapq.heapify(heap)
    while copies > 0 and len(heap) > 0:
        _, e = heapq.heappop(heap)
        if count[e] < num_ranks - 1 and sends[home[e]] < leaving:
            count[e] += 1
            sends[home[e]] += 1
            copies -= 1
            heapq.heappush(heap, (-forecast[e] / (count[e] + 1), e))
    return count


@compiled
def fill(forecast: np.ndarray, problem: Problem, number: int, leaving: int) -> np.ndarray:
    """Fill the slots greedily; each replica is placed on the least loaded rank with a free slot.

    Replicas are counted by tokens per holder, and placed in descending order of the shares. Nodes
    without the expert are preferred: there a replica serves tokens that would cross nodes. A copy
    across nodes must save more than its exposed time, in tokens that no longer cross and in tokens
    that leave an overloaded node. Otherwise the replica is placed on a node with the expert, or
    dropped.

    Args:
        forecast: [E] tokens.
        problem: homes, nodes and costs.
        number: limit for replicas of a rank.
        leaving: limit for replicas of one rank's home experts.

    Returns:
        [R, P] table of homes and replicas.
    """
    home, node, members, begin = problem.home, problem.node, problem.members, problem.begin
    table = problem.bare.copy()
    num_ranks = len(table)
    num_nodes = len(begin) - 1
    room = _room(table, number)
    count = _counts(forecast, home, num_ranks, room.sum(), leaving)
    share = forecast / (count + 1)
    load = np.zeros(num_ranks)
    for e in range(len(home)):
        load[home[e]] += share[e]
    mean = forecast.sum() / num_ranks
    copied = np.zeros(num_nodes)
    # the least loaded rank with a slot of each node
    lowest = np.empty(num_nodes, np.int64)
    for k in range(num_nodes):
        lowest[k] = _least_loaded(members[begin[k] : begin[k + 1]], load, room)
    has_copy = np.zeros(num_nodes, np.bool_)
    holds = np.zeros(num_ranks, np.bool_)
    for e in np.argsort(-share):
        if count[e] == 0:
            continue
        has_copy[:] = False
        holds[:] = False
        home_node = node[home[e]]
        has_copy[home_node] = True
        holds[home[e]] = True
        node_price = 0.0
        for i in range(begin[home_node], begin[home_node + 1]):
            node_price += load[members[i]]
        crowd = node_price - mean * (begin[home_node + 1] - begin[home_node])
        for placed in range(count[e]):
            best = -1
            # replicas without a place yet still count as load of the home's node
            relief = min(share[e], max(0.0, crowd + share[e] * (count[e] - placed)))
            for k in range(num_nodes):
                if lowest[k] < 0 or has_copy[k]:
                    continue
                if best >= 0 and load[lowest[k]] >= load[best]:
                    continue
                size = begin[k + 1] - begin[k]
                crossing = problem.crossing * forecast[e] * size / num_ranks
                if crossing + relief >= _exposed_share(problem, copied[k] + 1, size) * problem.far:
                    best = lowest[k]
            if best >= 0:
                copied[node[best]] += 1
            else:
                best = _least_loaded_inside(members, begin, has_copy, holds, load, room)
            if best < 0:
                # the replica is dropped, so the other holders serve more each
                for r in range(num_ranks):
                    load[r] += forecast[e] / (placed + 1) - share[e] if holds[r] else 0.0
                break
            _put(table, best, e)
            k = node[best]
            room[best] -= 1
            load[best] += share[e]
            has_copy[k] = True
            holds[best] = True
            lowest[k] = _least_loaded(members[begin[k] : begin[k + 1]], load, room)
    return table


@compiled
def _exposed_share(problem: Problem, copies: float, size: int) -> float:
    """Compute the share of one more copy to a node that does not hide.

    Args:
        problem: costs.
        copies: copies to the node, this one included.
        size: ranks of the node.
    """
    copying = copies * problem.far / (size if problem.scatters else 1)
    exposed = problem.out if copying * problem.out > problem.hidden else 0.0
    exposed += 1 - problem.out if copying * (1 - problem.out) > problem.hidden else 0.0
    return exposed


@compiled
def _least_loaded_inside(
    members: np.ndarray,
    begin: np.ndarray,
    has_copy: np.ndarray,
    holds: np.ndarray,
    load: np.ndarray,
    room: np.ndarray,
) -> int:
    """Find the least loaded rank that has room and not the expert, on nodes that hold it; or -1."""
    best = -1
    for k in range(len(has_copy)):
        if has_copy[k]:
            for i in range(begin[k], begin[k + 1]):
                r = members[i]
                if not holds[r] and room[r] > 0 and (best < 0 or load[r] < load[best]):
                    best = r
    return best


@compiled
def _put(table: np.ndarray, rank: int, expert: int) -> None:
    """Put an expert into the lowest free slot of a rank, in place."""
    c = 0
    while table[rank, c] >= 0:
        c += 1
    table[rank, c] = expert


@compiled
def most_leaving(forecast: np.ndarray, problem: Problem, number: int) -> int:
    """Count replicas of one rank's home experts, largest over ranks, without a limit."""
    num_ranks = len(problem.bare)
    room = _room(problem.bare, number)
    count = _counts(forecast, problem.home, num_ranks, room.sum(), number * num_ranks)
    leaving = np.zeros(num_ranks, np.int64)
    for e in range(len(count)):
        leaving[problem.home[e]] += count[e]
    return int(max(leaving))


@compiled
def _room(table: np.ndarray, number: int) -> np.ndarray:
    """Count the empty slots of each rank, ``number`` at most: [R] int64."""
    room = np.zeros(len(table), np.int64)
    for r in range(len(table)):
        for c in range(table.shape[1]):
            if table[r, c] < 0 and room[r] < number:
                room[r] += 1
    return room


@compiled
def _least_loaded(ranks: np.ndarray, load: np.ndarray, room: np.ndarray) -> int:
    """Find the least loaded of ``ranks`` with room; -1 if none has room."""
    best = -1
    for r in ranks:
        if room[r] > 0 and (best < 0 or load[r] < load[best]):
            best = r
    return best


@compiled
def plan_cost(
    forecast: np.ndarray, problem: Problem, table: np.ndarray, bound: float
) -> tuple[float, float]:
    """Compute the cost of a plan, in tokens of the busiest rank.

    Args:
        forecast: [E] tokens.
        problem: homes, nodes and costs.
        table: [R, P] experts.
        bound: cost from which on a lower bound is enough.

    Returns:
        The total cost, or its lower bound (perfectly balanced ranks) if that is not below
        ``bound``; and the part of replicas: copies, routing, computing.
    """
    crossing, overhead = cost_beside_load(forecast, problem, table)
    mean = forecast.sum() / len(table)
    # the lower bound first, because balancing takes most of the time
    if mean + crossing + overhead >= bound:
        return mean + crossing + overhead, overhead
    largest = forecast_load(forecast, table)
    overflow = OVERFLOW * max(0.0, largest - problem.limit)
    return largest + crossing + overhead + overflow, overhead


@compiled
def forecast_load(forecast: np.ndarray, table: np.ndarray) -> int:
    """Compute the largest rank load of a ``forecast`` [E] with ``table`` [R, P], in tokens.

    It may exceed the smallest possible one by 1 / `SLACK` of the mean.
    """
    tokens = np.empty(len(forecast), np.int64)
    for e in range(len(forecast)):
        tokens[e] = int(forecast[e] + 0.5)
    slack = int(forecast.sum() / len(table) / SLACK)
    return max(balance(tokens, table, slack, False).load)


@compiled
def cost_beside_load(
    forecast: np.ndarray, problem: Problem, table: np.ndarray
) -> tuple[float, float]:
    """Compute all costs of a plan but the rank load, in tokens of the busiest rank.

    Args:
        forecast: [E] tokens.
        problem: homes, nodes and costs.
        table: [R, P] experts.

    Returns:
        Tokens that cross nodes, of the busiest node; and copies, routing and computing.
    """
    home, node = problem.home, problem.node
    num_ranks = len(table)
    num_nodes = len(problem.begin) - 1
    begin, rank = holders_of(len(home), table)
    # by node: ranks, holders of one expert, tokens and copies that leave and arrive
    size = problem.begin[1:] - problem.begin[:-1]
    num_copies = np.zeros(num_nodes)
    leaves = np.zeros(num_nodes)
    arrives = np.zeros(num_nodes)
    copies_out = np.zeros(num_nodes)
    copies_in = np.zeros(num_nodes)
    # by rank: copies
    sends = np.zeros(num_ranks)
    received = np.zeros(num_ranks)
    # start as if no node held an expert: all tokens leave
    total = forecast.sum()
    for k in range(num_nodes):
        leaves[k] = total * size[k] / num_ranks
    for e in range(len(home)):
        holders = rank[begin[e] : begin[e + 1]]
        home_node = node[home[e]]
        elsewhere = num_ranks
        for r in holders:
            num_copies[node[r]] = 0
        for r in holders:
            k = node[r]
            # conditional expressions compile to selects; branches take 30 % more time here
            received[r] += 1 if r != home[e] else 0
            if num_copies[k] == 0:
                elsewhere -= size[k]
                leaves[k] -= forecast[e] * size[k] / num_ranks
                copies_in[k] += 1 if k != home_node else 0
                copies_out[home_node] += 1 if k != home_node else 0
            num_copies[k] += 1
        crossing = forecast[e] * elsewhere / num_ranks
        for r in holders:
            arrives[node[r]] += crossing / len(holders)
        if not problem.scatters:
            # the home sends all copies over the slowest link, one after another
            sends[home[e]] += len(holders) - 1
        elif num_copies[home_node] > SCATTERED:
            sends[home[e]] += 1
        else:
            sends[home[e]] += num_copies[home_node] - 1
    crossing = 0.0
    crossings = 0.0
    for k in range(num_nodes):
        crossing = max(crossing, problem.crossing * max(leaves[k], arrives[k]) / size[k])
        crossings = max(crossings, problem.far * max(copies_in[k], copies_out[k]) / size[k])
    if max(received) == 0:
        return crossing, 0.0
    copying = max(crossings, problem.near * max(max(received), max(sends)))
    if not problem.scatters and num_nodes > 1:
        copying = problem.far * max(max(received), max(sends))
    fixed = problem.routing + problem.computing * max(received)
    return crossing, _exposed_copying(copying, problem) + fixed


@compiled
def _exposed_copying(copying: float, problem: Problem) -> float:
    """Compute the exposed part of ``copying`` tokens, plus contention of the hidden part."""
    hidden_out = min(copying * problem.out, problem.hidden)
    hidden_back = min(copying * (1 - problem.out), problem.hidden)
    hidden = hidden_out + hidden_back
    return copying - hidden + problem.contention * hidden
