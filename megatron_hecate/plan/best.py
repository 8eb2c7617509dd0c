"""Which guests: the last plan while it is good, else the best of several starts. Compiled.

Loads drift, and most iterations are balanced well by the guests of the one before. A plan that is kept costs less to
find, and nothing that depends on it (graphs, schedules of copies) has to be made again.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.apportion import most_copies
from megatron_hecate.plan.compiled import borrowing, compiled
from megatron_hecate.plan.forest import arrange, forest_for, judge, outcome_for, scenarios_of
from megatron_hecate.plan.links import holders
from megatron_hecate.plan.pair import pair_up
from megatron_hecate.plan.regraft import improve
from megatron_hecate.plan.search import HEDGE, empty_slot, plan, spread
from megatron_hecate.plan.swap import GOAL, SPARE, unblock

# Swaps tried when one plan is searched, times the square of experts and guests: each costs about as much as these, and
# large graphs need fewer of them.
EFFORT: int = 300_000
FOREST_EFFORT: int = 4_500  # choices judged when guests are single, times ranks
ENOUGH_TRIES: int = 16  # with fewer, the graph is so large that other starts and loads than the forecast take too long,
FEW_TRIES: int = 4  # and with fewer than these, looking at the last plan takes as long as planning
TRIES_A_START: int = 70  # single guests are searched from one start more for each of these tries, the best first,
HOPELESS: int = 4  # but from none whose squares are so many times those of the best
# A plan is kept that is balanced with more of every even share in place than a new one needs, in 1/256: forecasts fail
# it as well as the loads drift. With 128, imbalance is left that new plans would not leave (bench/data).
KEEP: int = 160


@compiled
def plan_best(
    forecast: np.ndarray,
    others: np.ndarray,
    home: np.ndarray,
    bare: np.ndarray,
    order: np.ndarray,
    previous: np.ndarray,
    per_rank: int,
    copies: int,
    egress: int,
    priced: bool,
    quick: bool,
) -> tuple[np.ndarray, int, int, int]:
    """Place guests.

    Args:
        forecast: [E] tokens expected.
        others: [E, S] loads that may come instead; S may be 0, and 32 at most.
        home: [E].
        bare: [R, P] the table without guests.
        order: [R] ranks by node.
        previous: [R, P] the last plan; the bare table where there is none.
        per_rank: guests a rank may host, at most.
        copies: guests in all, at most.
        egress: copies that may leave one rank.
        priced: whether it matters how good the plan is.
        quick: whether to search from the best start only; of more guests than one, from the first.

    Returns:
        table: [R, P] with guests.
        largest: the largest rank load expected; 0 where nobody looked.
        received: guests of the rank that has most.
        sent: copies that leave the rank which lends most.
    """
    num_ranks, slots = bare.shape
    allowed = np.zeros(num_ranks, np.int64)
    for r in range(num_ranks):
        for c in range(slots):
            allowed[r] += bare[r, c] < 0
        allowed[r] = min(allowed[r], per_rank)
    copies = min(copies, allowed.sum())
    most = most_copies(forecast, home, num_ranks, egress)
    last = previous.ravel().copy()
    if not _fits(forecast, home, bare, previous, allowed, copies, most):
        last = last[:0]
    if per_rank == 1 and others.shape[1] > 0 and looks_ahead(num_ranks):
        tries = FOREST_EFFORT // num_ranks
        starts = 1 if quick else max(1, tries // TRIES_A_START)
        tries = tries // 2 if priced else tries  # then there may be two such plans to make
        table = _plan_forest(forecast, others, home, bare, last, allowed, copies, most, tries, starts)
        largest = _hedged(forecast, home, table, order, most, 0) if priced else 0  # the hedge is in the plan
    else:
        table, largest = _plan_hedged(forecast, home, bare, order, last, allowed, copies, most, priced, quick)
    received, sent = busiest(table.reshape(bare.shape), home)
    return table.reshape(bare.shape), largest, received, sent


@compiled
def busiest(table: np.ndarray, home: np.ndarray) -> tuple[int, int]:
    """Of ``table`` [R, P]: guests of the rank that has most, and copies that leave the rank which lends most."""
    num_ranks, slots = table.shape
    received, sent = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for r in range(num_ranks):
        for c in range(slots):
            e = table[r, c]
            if e >= 0 and home[e] != r:
                received[r] += 1
                sent[home[e]] += 1
    return received.max(), sent.max()


@compiled
def looks_ahead(num_ranks: int) -> bool:
    """Whether groups of so many ranks are small enough to plan single guests for more loads than the forecast."""
    return FOREST_EFFORT // num_ranks >= ENOUGH_TRIES


@borrowing
def _guest(table: np.ndarray, home: np.ndarray, rank: int, slot: int) -> int:
    """The guest in a slot of ``rank``, in ``table`` [R * P], or -1."""
    e = table[slot]
    return e if e >= 0 and home[e] != rank else -1


@compiled
def _fits(
    forecast: np.ndarray,
    home: np.ndarray,
    bare: np.ndarray,
    previous: np.ndarray,
    allowed: np.ndarray,
    copies: int,
    most: np.ndarray,
) -> bool:
    """Whether ``previous`` is a plan for these homes that makes full use of the limits and breaks none."""
    received, given = np.zeros(len(bare), np.int64), np.zeros(len(home), np.int64)
    for r in range(len(bare)):
        for c in range(bare.shape[1]):
            e = previous[r, c]
            if e == bare[r, c]:
                continue
            if bare[r, c] >= 0 or e < 0 or home[e] == r or forecast[e] == 0:
                return False
            received[r] += 1
            given[e] += 1
            if received[r] > allowed[r] or given[e] > most[e]:
                return False
    return received.sum() == copies > 0


@compiled
def _hedged(
    forecast: np.ndarray, home: np.ndarray, table: np.ndarray, order: np.ndarray, most: np.ndarray, hedge: int
) -> int:
    """The largest rank load of the hedged flow."""
    count, where = holders(table, order, len(home), SPARE)
    return unblock(forecast, home, table, count, where, len(order), most, hedge, 0)


@compiled
def _plan_hedged(
    forecast: np.ndarray,
    home: np.ndarray,
    bare: np.ndarray,
    order: np.ndarray,
    last: np.ndarray,
    allowed: np.ndarray,
    copies: int,
    most: np.ndarray,
    priced: bool,
    quick: bool,
) -> tuple[np.ndarray, int]:
    """[R * P] a plan for the forecast, and the largest rank load of its hedged flow, or 0 where nobody looked: ``last``
    [R * P or 0] while that is good, but for large graphs without a price."""
    num_ranks = len(bare)
    mean = forecast.sum() // num_ranks
    goal = mean + mean // GOAL
    tries = EFFORT // (len(home) + copies) ** 2
    if tries == 0 and not priced:
        tries = -1  # a flow that only says how good a plan is would take most of the time
    if len(last) and (priced or tries >= FEW_TRIES):
        largest = _hedged(forecast, home, last, order, most, KEEP)
        if largest <= goal:
            return last, largest
    table, largest = plan(forecast, home, bare, order, allowed, copies, most, HEDGE, tries)
    for start in range(2):
        if quick or largest <= goal or tries < ENOUGH_TRIES:
            break
        other = bare.ravel().copy()
        pair_up(forecast, home, other, allowed.copy(), most, copies, start == 1)
        count, where = holders(other, order, len(home), SPARE)
        its_largest = unblock(forecast, home, other, count, where, num_ranks, most, HEDGE, tries)
        if its_largest < largest:
            table, largest = other, its_largest
    return table, largest


@compiled
def _plan_forest(
    forecast: np.ndarray,
    others: np.ndarray,
    home: np.ndarray,
    bare: np.ndarray,
    last: np.ndarray,
    allowed: np.ndarray,
    copies: int,
    most: np.ndarray,
    tries: int,
    starts: int,
) -> np.ndarray:
    """[R * P] a plan with at most one guest per rank for ``others``, searched from the ``starts`` best of four starts,
    of which ``last`` [R * P or 0] is one. What the forecast knows nothing of gets no guest."""
    num_ranks, slots = bare.shape
    scenarios = scenarios_of(others, forecast, home, num_ranks)
    outcome, forest = outcome_for(len(home), num_ranks), forest_for(num_ranks)
    guest, squares = np.full((4, num_ranks), -1), np.full(4, np.inf)
    for start in range(0 if len(last) else 1, min(4, 2 + starts)):  # the fourth is seldom the best
        if start == 0:
            table = last
        elif start == 1:
            table = spread(forecast, home, bare, allowed, copies, most)
        else:
            table = bare.ravel().copy()
            pair_up(forecast, home, table, allowed.copy(), most, copies, start == 2)
        for r in range(num_ranks):
            for c in range(r * slots, (r + 1) * slots):
                guest[start, r] = max(guest[start, r], _guest(table, home, r, c))
        arrange(guest[start], home, forest)
        squares[start] = judge(guest[start], home, forest, scenarios, outcome)
        if squares[start] == 0:
            break
    best = np.argmin(squares)
    least = squares[best]
    most_squares = HOPELESS * least
    useful = np.where(forecast > 0, most, 0)
    for _ in range(starts):
        start = np.argmin(squares)
        if least == 0 or squares[start] > most_squares:
            break
        squares[start] = np.inf
        its_squares = improve(guest[start], home, useful, scenarios, tries)
        if its_squares < least:
            best, least = start, its_squares
    table = bare.ravel().copy()
    for r in range(num_ranks):
        e = guest[best, r]
        if e >= 0:
            table[empty_slot(table, slots, r, e)] = e
    return table
