"""What guests achieve when no rank hosts more than one, under many loads at once: a compiled core of the planner.

With one guest per rank tokens have few ways out, so it counts what a plan does under other loads than the forecast. It
also makes the graph of holders simple. A rank can take tokens from one other, the home of its guest: ranks form trees,
each perhaps with a cycle at its root. How many tokens rank r can take follows from the leaves upwards, for many loads
(*scenarios*) in one pass:

    can[r] = cap - own load + sum over its own experts e of min(tokens[e], sum of can[c] over e's hosts c)

Where that is negative, so many tokens exceed the cap whatever the quotas are: summed, the deficit of a maximum flow.

Tokens are float32 below 2^24 that are integers, so their sums are exact; all scenarios are looked at together
(`lanes`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled
from megatron_hecate.plan.lanes import LANES, dot, least, load, positive, store, zeros
from megatron_hecate.plan.links import by_home

TOKENS: int = 1 << 22  # of a scenario; on a cycle they are counted twice
TINY: float = 1e-290  # a scenario with less in all is without tokens: what it is to be scaled by may be infinite
CAP: float = 1.02  # in mean rank loads. 1.01 to 1.04 leave as little on the traces in bench/data


class Scenarios(NamedTuple):
    """Loads that may come, and the homes. Lanes without a scenario have no tokens, and no room.

    Args:
        tokens: [E, 32] float32.
        room: [R, 32] float32, from the load of a rank's own experts to the cap; may be negative.
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
        can: [R, 32] tokens a rank can take from its guest's home, at least 0.
        lack: [R, 32] tokens above the cap that find no room.
        taken: [E, 32] what an expert's hosts can take together; of experts with hosts.
        lacking: [1, 32] sum of ``lack`` over the ranks.
        idle: [R] whether ``can`` and ``lack`` are those of a rank that lends nothing, which are always the same.
        hosts: [E] how many.
        lent: [R] one of a rank's experts that have hosts, or -1,
        next_lent: [E] and the one after each, or -1.
        order: [R] ranks, each before the home of its guest; ranks on cycles last, each cycle in that order too.
        waiting: [R] room to work in.
    """

    can: np.ndarray
    lack: np.ndarray
    taken: np.ndarray
    lacking: np.ndarray
    idle: np.ndarray
    hosts: np.ndarray
    lent: np.ndarray
    next_lent: np.ndarray
    order: np.ndarray
    waiting: np.ndarray


@compiled
def scenarios_of(loads: np.ndarray, forecast: np.ndarray, home: np.ndarray, num_ranks: int) -> Scenarios:
    """``loads`` [E, S] >= 0, no more than 32; one of them that has no tokens counts as the ``forecast`` [E]."""
    num_experts, size = loads.shape
    assert len(home) == num_experts and size <= LANES
    scale = np.zeros(size)
    for e in range(num_experts):
        for s in range(size):
            scale[s] += loads[e, s]
    for s in range(size):
        scale[s] = TOKENS / scale[s] if scale[s] > TINY else 0.0
    tokens = np.zeros((num_experts, LANES), np.float32)
    room = np.zeros((num_ranks, LANES), np.float32)
    for e in range(num_experts):
        for s in range(size):
            tokens[e, s] = np.float32(np.int32(loads[e, s] * scale[s] + 0.5))
    for s in range(size):
        if scale[s] == 0.0:
            each = TOKENS / forecast.sum()
            for e in range(num_experts):
                tokens[e, s] = np.float32(np.int32(forecast[e] * each + 0.5))
    counted = zeros()
    for e in range(num_experts):
        store(room, home[e], load(room, home[e]) - load(tokens, e))
        counted = counted + load(tokens, e)
    cap = np.zeros((1, LANES), np.float32)
    store(cap, 0, counted)
    for s in range(size):
        cap[0, s] = np.rint(cap[0, s] * CAP / num_ranks)
    for r in range(num_ranks):
        store(room, r, load(room, r) + load(cap, 0))
    first, experts = by_home(home, num_ranks)
    return Scenarios(tokens, room, first, experts)


@compiled
def outcome_for(scenarios: Scenarios) -> Outcome:
    """Room for what `judge` finds."""
    num_experts, num_ranks = len(scenarios.tokens), len(scenarios.room)
    can, lack = np.empty((num_ranks, LANES), np.float32), np.empty((num_ranks, LANES), np.float32)
    taken, lacking = np.zeros((num_experts, LANES), np.float32), np.empty((1, LANES), np.float32)
    hosts, next_lent = np.empty(num_experts, np.int64), np.empty(num_experts, np.int64)
    lent, order, waiting = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    idle = np.zeros(num_ranks, np.bool_)
    return Outcome(can, lack, taken, lacking, idle, hosts, lent, next_lent, order, waiting)


@borrowing
def judge(guest: np.ndarray, home: np.ndarray, scenarios: Scenarios, outcome: Outcome) -> tuple[float, int]:
    """Find the outcome of ``guest`` [R], the expert each rank hosts or -1.

    Returns:
        squares: of the tokens above the cap, summed over the scenarios.
        trees: ranks that are on no cycle.
    """
    can, lack, taken, lacking, idle, hosts, lent, next_lent, order, waiting = outcome
    num_ranks = len(guest)
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
                store(taken, e, zeros())
    found = 0
    for r in range(num_ranks):
        if waiting[r] == 0:
            order[found] = r
            found += 1
    without_room = zeros()
    i = 0
    while i < found:
        r = order[i]
        i += 1
        if lent[r] >= 0 or not idle[r]:
            room = _room(r, scenarios, outcome)
            store(lack, r, positive(zeros() - room))
            store(can, r, positive(room))
            idle[r] = lent[r] < 0
        without_room = without_room + load(lack, r)
        e = guest[r]
        if e >= 0:
            store(taken, e, load(taken, e) + load(can, r))
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
            e = guest[r]
            store(can, r, positive(_room(r, scenarios, outcome)))
            store(taken, e, load(taken, e) + load(can, r))
            r = home[e]
            if r == start:
                break
        while True:
            e = guest[r]
            room = _room(r, scenarios, outcome)
            store(lack, r, positive(zeros() - room))
            without_room = without_room + load(lack, r)
            if home[e] != start:
                store(taken, e, load(taken, e) + (positive(room) - load(can, r)))
                store(can, r, positive(room))
            waiting[r], idle[r] = 0, False
            r = home[e]
            if r == start:
                break
    store(lacking, 0, without_room)
    return dot(without_room, without_room), trees


@borrowing
def _room(r: int, scenarios: Scenarios, outcome: Outcome) -> np.ndarray:
    """[32] from the load of rank r, less what the hosts of its experts can take, to the cap; below 0 too."""
    room = load(scenarios.room, r)
    e = outcome.lent[r]
    while e >= 0:
        room = room + least(load(scenarios.tokens, e), load(outcome.taken, e))
        e = outcome.next_lent[e]
    return room
