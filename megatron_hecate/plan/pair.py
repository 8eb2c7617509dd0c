"""Another way to choose guests: pair ranks that have too much with ranks that have too little. Compiled.

Walker's alias method, in Vose's form (IEEE Transactions on Software Engineering 17(9), 1991), with ranks for columns:
the most loaded rank fills one cold rank exactly and may fall below the mean by it; then it is a cold rank itself and
some other fills it. One guest per rank balances any forecast this way, as long as single experts are large enough to
fill ranks. It fits the forecast and has no slack, so it is a start for `swap.unblock` where `search.fill` left a rank
blocked.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.compiled import compiled
from megatron_hecate.plan.links import by_home
from megatron_hecate.plan.search import empty_slot, top_up
from megatron_hecate.plan.sort import NONE, index_of, key, largest, value_of


@compiled
def pair_up(
    forecast: np.ndarray,
    home: np.ndarray,
    table: np.ndarray,
    free: np.ndarray,
    most: np.ndarray,
    copies: int,
    closest: bool,
) -> None:
    """Put at most ``copies`` guests into empty slots, in place.

    Args:
        forecast: [E] int.
        home: [E].
        table: [R * P] expert of each slot or -1; homes only.
        free: [R] slots a rank may still fill; used up in place.
        most: [E] guests an expert may have.
        copies: guests in all.
        closest: fill the rank whose need is closest to what the other has too much, instead of the neediest.
    """
    num_ranks = len(free)
    slots = len(table) // num_ranks
    left = forecast.copy()  # what each expert's home still serves
    given = np.zeros(len(forecast), np.int64)
    load = np.zeros(num_ranks, np.int64)
    for e in range(len(forecast)):
        load[home[e]] += forecast[e]
    mean = load.sum() // num_ranks
    need = np.empty(num_ranks, np.int64)  # of those that have any; else 0
    surplus, score = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)  # keys
    for r in range(num_ranks):
        surplus[r] = key(load[r] - mean, r) if load[r] > mean else NONE
        need[r] = mean - load[r] if load[r] < mean and free[r] > 0 else 0
    first, experts = by_home(home, num_ranks)
    while copies > 0:
        most_over = largest(surplus)
        if most_over == NONE:
            break
        hot, over = index_of(most_over), value_of(most_over)
        expert = -1
        for i in range(first[hot], first[hot + 1]):
            e = experts[i]
            if given[e] < most[e] and (expert < 0 or left[e] > left[expert]):
                expert = e
        if expert < 0 or left[expert] == 0:
            surplus[hot] = NONE
            continue
        can = left[expert]
        if free[hot] == 0:  # nobody can fill it again
            can = min(can, over)
        for r in range(num_ranks):
            filled = 2 * mean - abs(need[r] - over) if closest else need[r]
            its_score = filled if need[r] <= can else can - need[r]  # filled in part only
            score[r] = key(its_score, r) if need[r] > 0 else NONE
        best = largest(score)
        while best != NONE and empty_slot(table, slots, index_of(best), expert) < 0:  # it holds the expert already
            score[index_of(best)] = NONE
            best = largest(score)
        if best == NONE:
            surplus[hot] = NONE
            continue
        cold = index_of(best)
        amount = min(need[cold], can)
        table[empty_slot(table, slots, cold, expert)] = expert
        left[expert] -= amount
        load[hot] -= amount
        load[cold] += amount
        given[expert] += 1
        free[cold] -= 1
        copies -= 1
        surplus[hot] = key(over - amount, hot) if over > amount else NONE
        need[hot] = amount - over if over < amount and free[hot] > 0 else 0
        need[cold] = need[cold] - amount if need[cold] > amount and free[cold] > 0 else 0
    top_up(forecast, given, most, table, free, load, copies)
