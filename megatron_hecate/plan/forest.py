"""What guests achieve when no rank hosts more than one, under many loads at once: a compiled core of the planner.

With one guest per rank tokens have few ways out, so it counts what a plan does under other loads than the forecast. It
also makes the graph of holders simple. A rank can take tokens from one other, the home of its guest: ranks form trees,
each perhaps with a cycle at its root. How many tokens rank r can take follows from the leaves upwards, for many loads
(*scenarios*) in one pass:

    can[r] = cap - own load + sum over its own experts e of min(tokens[e], sum of can[c] over e's hosts c)

Where that is negative, so many tokens exceed the cap whatever the quotas are: summed, the deficit of a maximum flow.

Tokens are float32 below 2^24 that are integers: their sums are exact, and eight of them fit in a vector register.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hecate.plan.compiled import compiled
from megatron_hecate.plan.links import by_home

TOKENS: int = 1 << 22  # of a scenario; on a cycle they are counted twice
CAP: float = 1.02  # in mean rank loads. 1.01 to 1.04 leave as little on the traces in bench/data


class Scenarios(NamedTuple):
    """Loads that may come, and the homes.

    Args:
        tokens: [E, S] float32.
        room: [R, S] float32, from the load of a rank's own experts to the cap; may be negative.
        first: [R + 1] where each rank's experts begin in ``experts``.
        experts: [E] by home.
    """

    tokens: np.ndarray
    room: np.ndarray
    first: np.ndarray
    experts: np.ndarray


class Outcome(NamedTuple):
    """What one choice of guests achieves.

    Args:
        can: [R, S] tokens a rank can take from its guest's home, at least 0.
        lack: [R, S] tokens above the cap that find no room.
        taken: [E, S] what an expert's hosts can take together; of experts with hosts.
        idle: [R] whether ``can`` and ``lack`` are those of a rank that lends nothing, which are always the same.
        hosts: [E] how many.
        lent: [R] one of a rank's experts that have hosts, or -1,
        next_lent: [E] and the one after each, or -1.
        order: [R] ranks, each before the home of its guest; ranks on cycles last, each cycle in that order too.
        waiting: [R] room to work in.
        lacking: [S] sum of ``lack`` over the ranks.
    """

    can: np.ndarray
    lack: np.ndarray
    taken: np.ndarray
    idle: np.ndarray
    hosts: np.ndarray
    lent: np.ndarray
    next_lent: np.ndarray
    order: np.ndarray
    waiting: np.ndarray
    lacking: np.ndarray


@compiled
def scenarios_of(loads: np.ndarray, forecast: np.ndarray, home: np.ndarray, num_ranks: int) -> Scenarios:
    """``loads`` [E, S] >= 0; one of them that has no tokens counts as the ``forecast`` [E]."""
    num_experts, size = loads.shape
    assert len(home) == num_experts
    scale = np.zeros(size)
    for e in range(num_experts):
        for s in range(size):
            scale[s] += loads[e, s]
    for s in range(size):
        scale[s] = TOKENS / scale[s] if scale[s] > 0.0 else 0.0
    tokens = np.empty((num_experts, size), np.float32)
    room = np.zeros((num_ranks, size), np.float32)
    for e in range(num_experts):
        for s in range(size):
            tokens[e, s] = np.float32(np.int32(loads[e, s] * scale[s] + 0.5))
    for s in range(size):
        if scale[s] == 0.0:
            each = TOKENS / forecast.sum()
            for e in range(num_experts):
                tokens[e, s] = np.float32(np.int32(forecast[e] * each + 0.5))
    for e in range(num_experts):
        r = home[e]
        for s in range(size):
            room[r, s] -= tokens[e, s]
    counted = np.zeros(size, np.float32)
    for r in range(num_ranks):
        for s in range(size):
            counted[s] -= room[r, s]
    for s in range(size):
        counted[s] = np.rint(counted[s] * CAP / num_ranks)
    for r in range(num_ranks):
        for s in range(size):
            room[r, s] += counted[s]
    first, experts = by_home(home, num_ranks)
    return Scenarios(tokens, room, first, experts)


@compiled
def outcome_for(scenarios: Scenarios) -> Outcome:
    """Room for what `judge` finds."""
    num_experts, size = scenarios.tokens.shape
    num_ranks = len(scenarios.room)
    can, lack = np.empty((num_ranks, size), np.float32), np.empty((num_ranks, size), np.float32)
    taken = np.zeros((num_experts, size), np.float32)
    hosts, next_lent = np.empty(num_experts, np.int64), np.empty(num_experts, np.int64)
    lent, order, waiting = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    idle = np.zeros(num_ranks, np.bool_)
    return Outcome(can, lack, taken, idle, hosts, lent, next_lent, order, waiting, np.empty(size, np.float32))


@compiled
def judge(guest: np.ndarray, home: np.ndarray, scenarios: Scenarios, outcome: Outcome) -> tuple[float, int]:
    """Find the outcome of ``guest`` [R], the expert each rank hosts or -1.

    Returns:
        squares: of the tokens above the cap, summed over the scenarios.
        trees: ranks that are on no cycle.
    """
    tokens, room = scenarios.tokens, scenarios.room
    can, lack, taken, idle, hosts, lent, next_lent, order, waiting, lacking = outcome
    num_ranks, size = room.shape
    waiting[:] = 0
    hosts[:] = 0
    lent[:] = -1
    for r in range(num_ranks):
        e = guest[r]
        if e >= 0:
            lender = home[e]
            waiting[lender] += 1
            hosts[e] += 1
            if hosts[e] == 1:
                next_lent[e], lent[lender] = lent[lender], e
                for s in range(size):
                    taken[e, s] = 0
    none = np.float32(0)
    found = 0
    for r in range(num_ranks):
        if waiting[r] == 0:
            order[found] = r
            found += 1
    i = 0
    while i < found:
        r = order[i]
        i += 1
        if lent[r] >= 0 or not idle[r]:
            _relieve(r, tokens, room, lent, next_lent, taken, can)
            _settle(r, can, lack)
            idle[r] = lent[r] < 0
        e = guest[r]
        if e >= 0:
            for s in range(size):
                taken[e, s] += can[r, s]
            waiting[home[e]] -= 1
            if waiting[home[e]] == 0:
                order[found] = home[e]
                found += 1
    trees = found
    # Tokens that go all the way round a cycle achieve nothing, so one link of it may be still. Passing twice finds what
    # comes by the last link: first as if nothing did.
    for start in range(num_ranks):
        if waiting[start] == 0:
            continue
        r = start
        while True:
            order[found] = r
            found += 1
            _relieve(r, tokens, room, lent, next_lent, taken, can)
            e = guest[r]
            for s in range(size):
                can[r, s] = none if can[r, s] < none else can[r, s]
                taken[e, s] += can[r, s]
            r = home[e]
            if r == start:
                break
        while True:
            e = guest[r]
            lacking[:] = can[r]  # as it was
            _relieve(r, tokens, room, lent, next_lent, taken, can)
            _settle(r, can, lack)
            if home[e] == start:
                can[r] = lacking
            else:
                for s in range(size):
                    taken[e, s] += can[r, s] - lacking[s]
            waiting[r], idle[r] = 0, False
            r = home[e]
            if r == start:
                break
    lacking[:] = 0
    for r in range(num_ranks):
        for s in range(size):
            lacking[s] += lack[r, s]
    squares = 0.0
    for s in range(size):
        squares += np.float64(lacking[s]) * np.float64(lacking[s])
    return squares, trees


@compiled
def _relieve(
    r: int,
    tokens: np.ndarray,
    room: np.ndarray,
    lent: np.ndarray,
    next_lent: np.ndarray,
    taken: np.ndarray,
    can: np.ndarray,
) -> None:
    """``can[r]``, below 0 too, from what the hosts of its experts can take."""
    size = room.shape[1]
    for s in range(size):
        can[r, s] = room[r, s]
    e = lent[r]
    while e >= 0:
        for s in range(size):
            can[r, s] += tokens[e, s] if tokens[e, s] < taken[e, s] else taken[e, s]
        e = next_lent[e]


@compiled
def _settle(r: int, can: np.ndarray, lack: np.ndarray) -> None:
    """What ``can[r]`` is below 0 goes to ``lack[r]``."""
    none = np.float32(0)
    for s in range(can.shape[1]):
        lack[r, s] = none if can[r, s] > none else -can[r, s]
        can[r, s] = none if can[r, s] < none else can[r, s]
