"""What guests achieve when no rank hosts more than one, under many loads at once: a compiled core of the planner.

With one guest per rank tokens have few ways out, so it counts what a plan does under other loads than the forecast. It
also makes the graph of holders simple. A rank can take tokens from one other, the home of its guest: ranks form trees,
each perhaps with a cycle at its root. How many tokens rank r can take follows from the leaves upwards, for many loads
(*scenarios*) in one pass:

    can[r] = cap - own load + sum over its own experts e of min(tokens[e], sum of can[c] over e's hosts c)

Where that is negative, so many tokens exceed the cap whatever the quotas are: summed, the deficit of a maximum flow.

All scenarios are looked at together (`lanes`), each of so few tokens that sums are exact in 16 bits: no rank can take
more than the cap, nor all together more than R of it, and no rank hosts an expert of its own. That is fine enough for
what `best.looks_ahead` allows, 281 ranks, where the cap is 115 tokens and the mean 113.9; experts below 1/32,000 of all
tokens count as none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled
from megatron_hecate.plan.lanes import (
    LANES,
    every,
    least,
    load,
    positive,
    rows_of,
    squared,
    store,
    whole,
    zeros,
)
from megatron_hecate.plan.links import by_home

# Of a scenario; float32 may make them 0.2 % more. The room of all ranks is CAP times as many, and that is below 2^15.
TOKENS: int = 32_000
TINY: float = 2.0**-60  # sums of loads between these two, and proportions of them, are in the range of float32
HUGE: float = 2.0**60
CAP: float = 1.02  # in mean rank loads. 1.01 to 1.04 leave as little on the traces in bench/data


class Scenarios(NamedTuple):
    """Loads that may come, and the homes. Lanes without a scenario have no tokens, and no room.

    Args:
        tokens: [E, 32] int16, rounded down.
        room: [R, 32] int16, from the load of a rank's own experts to the cap; may be negative.
        first: [R + 1] where each rank's experts begin in ``experts``.
        experts: [E] by home.
    """

    tokens: np.ndarray
    room: np.ndarray
    first: np.ndarray
    experts: np.ndarray


class Forest(NamedTuple):
    """In which order ranks are judged.

    Args:
        order: [R] ranks, each before the home of its guest; ranks on cycles last, each cycle in that order too.
        place: [R] of each rank in ``order``.
        trees: [1] how many ranks are on no cycle.
    """

    order: np.ndarray
    place: np.ndarray
    trees: np.ndarray


class Outcome(NamedTuple):
    """What one choice of guests achieves, in int16.

    Args:
        room: [R, 32] from the load of a rank, less what the hosts of its experts can take, to the cap. Tokens above the
            cap that find no room are below 0.
        can: [R, 32] tokens a rank can take from its guest's home, at least 0.
        taken: [E, 32] what an expert's hosts can take together; of experts with hosts.
        lacking: [1, 32] tokens above the cap that find no room, of all ranks.
    """

    room: np.ndarray
    can: np.ndarray
    taken: np.ndarray
    lacking: np.ndarray


@compiled
def scenarios_of(loads: np.ndarray, forecast: np.ndarray, home: np.ndarray, num_ranks: int) -> Scenarios:
    """``loads`` [E, S] float32 >= 0, no more than 32; one of them that has no tokens counts as the ``forecast`` [E]."""
    num_experts, size = loads.shape
    assert len(home) == num_experts and size <= LANES
    tokens, room = rows_of(num_experts, np.int16), rows_of(num_ranks, np.int16)
    cap, each = rows_of(1, np.int16), rows_of(1, np.float32)
    counted = every(np.float32(0.0))  # stays so where there are fewer
    if size == LANES:
        for e in range(num_experts):
            counted = counted + load(loads, e)
    store(each, 0, counted)
    if each.min() > TINY and each.max() < HUGE:
        for s in range(size):
            each[0, s] = TOKENS / each[0, s]
        for e in range(num_experts):
            store(tokens, e, whole(load(loads, e) * load(each, 0)))
    else:
        _scale_one_by_one(loads, forecast, tokens)
    for r in range(num_ranks):
        store(room, r, zeros())
    in_all = zeros()
    for e in range(num_experts):
        store(room, home[e], load(room, home[e]) - load(tokens, e))
        in_all = in_all + load(tokens, e)
    store(cap, 0, in_all)
    for s in range(size):
        cap[0, s] = np.int16(cap[0, s] * CAP / num_ranks)
    for r in range(num_ranks):
        store(room, r, load(room, r) + load(cap, 0))
    first, experts = by_home(home, num_ranks)
    return Scenarios(tokens, room, first, experts)


@borrowing
def _scale_one_by_one(loads: np.ndarray, forecast: np.ndarray, tokens: np.ndarray) -> None:
    """Fill ``tokens`` [E, 32] from fewer than 32 loads, from empty ones, or from some in a unit of any size."""
    num_experts, size = loads.shape
    for e in range(num_experts):
        store(tokens, e, zeros())
    for s in range(size):
        total = 0.0
        for e in range(num_experts):
            total += loads[e, s]
        scale = TOKENS / total if total > 0.0 else TOKENS / forecast.sum()
        for e in range(num_experts):
            tokens[e, s] = np.int16((loads[e, s] if total > 0.0 else forecast[e]) * scale)


@compiled
def forest_for(num_ranks: int) -> Forest:
    """Room for what `arrange` finds."""
    return Forest(np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64), np.empty(1, np.int64))


@compiled
def outcome_for(num_experts: int, num_ranks: int) -> Outcome:
    """Room for what `judge` finds."""
    room, can = rows_of(num_ranks, np.int16), rows_of(num_ranks, np.int16)
    return Outcome(room, can, rows_of(num_experts, np.int16), rows_of(1, np.int16))


@borrowing
def arrange(guest: np.ndarray, home: np.ndarray, forest: Forest) -> None:
    """Find the order of the ranks for ``guest`` [R], the expert each rank hosts or -1, and ``home`` [E]."""
    order, place, trees = forest
    num_ranks = len(guest)
    for r in range(num_ranks):
        place[r] = -1
    for r in range(num_ranks):
        if guest[r] >= 0:
            place[home[guest[r]]] -= 1  # -1 less the hosts that it waits for, until its place is known
    found = 0
    for r in range(num_ranks):
        if place[r] == -1:
            order[found], place[r] = r, found
            found += 1
    i = 0
    while i < found:
        e = guest[order[i]]
        i += 1
        if e >= 0:
            lender = home[e]
            place[lender] += 1
            if place[lender] == -1:
                order[found], place[lender] = lender, found
                found += 1
    trees[0] = found
    for start in range(num_ranks if found < num_ranks else 0):
        r = start
        while place[r] < 0:
            order[found], place[r] = r, found
            found += 1
            r = home[guest[r]]


@borrowing
def rearrange(guest: np.ndarray, home: np.ndarray, rank: int, before: Forest, after: Forest) -> bool:
    """Whether the order of ``before`` is still right when ``rank`` hosts another guest, and nothing else changed. If
    not, ``after`` gets another one, but no ``place``.

    Only the home of the new guest may be too early in the order, and homes that this one's tokens go on to: they move
    behind ``rank``.
    """
    order, place, trees = before
    last, lender = place[rank], home[guest[rank]] if guest[rank] >= 0 else rank
    if last < trees[0] and last <= place[lender]:
        return True
    r = lender
    while place[r] < last < trees[0] and guest[r] >= 0:
        r = home[guest[r]]
    if last >= trees[0] or r == rank:  # leaves a cycle, or closes one
        arrange(guest, home, after)
        return False
    after.trees[0] = trees[0]
    moving, to = lender, 0
    for i in range(len(order)):
        r = order[i]
        if r == moving and i < last:
            moving = home[guest[r]] if guest[r] >= 0 else rank
            continue
        after.order[to] = r
        to += 1
        if i == last:
            r = lender
            while place[r] < last:
                after.order[to] = r
                to += 1
                if guest[r] < 0:
                    break
                r = home[guest[r]]
    return False


@borrowing
def judge(guest: np.ndarray, home: np.ndarray, forest: Forest, scenarios: Scenarios, outcome: Outcome) -> float:
    """Find the outcome of ``guest`` [R], whose order is ``forest``'s.

    Returns:
        The squares of the tokens above the cap, summed over the scenarios.
    """
    room, can, taken, lacking = outcome
    order, trees = forest.order, forest.trees[0]
    for r in range(len(guest)):
        store(room, r, load(scenarios.room, r))
        if guest[r] >= 0:
            store(taken, guest[r], zeros())
    without_room = zeros()
    for i in range(trees):
        r = order[i]
        its_room = load(room, r)
        without_room = without_room + positive(zeros() - its_room)
        store(can, r, positive(its_room))
        if guest[r] >= 0:
            _take(guest[r], positive(its_room), home, scenarios, outcome)
    # Tokens that go all the way round a cycle achieve nothing, so one link of it may be still. Passing twice finds what
    # comes by the last link: first as if nothing did.
    i = trees
    while i < len(order):
        begin, start = i, order[i]
        r = start
        while True:
            store(can, r, positive(load(room, r)))
            _take(guest[r], load(can, r), home, scenarios, outcome)
            i += 1
            r = home[guest[r]]
            if r == start:
                break
        for k in range(begin, i):
            r = order[k]
            its_room = load(room, r)
            without_room = without_room + positive(zeros() - its_room)
            if k < i - 1:
                _take(guest[r], positive(its_room) - load(can, r), home, scenarios, outcome)
                store(can, r, positive(its_room))
    store(lacking, 0, without_room)
    return np.float64(squared(without_room))


@borrowing
def judge_change(
    guest: np.ndarray,
    home: np.ndarray,
    rank: int,
    forest: Forest,
    other: Forest,
    scenarios: Scenarios,
    outcome: Outcome,
) -> float:
    """`judge`, when ``guest`` differs from that of ``forest`` in what ``rank`` hosts; ``other`` is room to work in."""
    if rearrange(guest, home, rank, forest, other):
        return judge(guest, home, forest, scenarios, outcome)
    return judge(guest, home, other, scenarios, outcome)


@borrowing
def _take(expert: int, more: np.ndarray, home: np.ndarray, scenarios: Scenarios, outcome: Outcome) -> None:
    """Let the hosts of ``expert`` take ``more`` [32]; its home has room for what they take."""
    tokens, before, lender = load(scenarios.tokens, expert), load(outcome.taken, expert), home[expert]
    store(outcome.taken, expert, before + more)
    gained = least(tokens, before + more) - least(tokens, before)
    store(outcome.room, lender, load(outcome.room, lender) + gained)
