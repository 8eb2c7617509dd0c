"""The few cheapest of many guests that were looked at, in order. Compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled


class Shortlist(NamedTuple):
    """Guests, the cheapest first; of equals the one that was offered first.

    Args:
        cost: [K] float64.
        place: [K] a slot, or a rank.
        expert: [K]; -1 behind the last.
    """

    cost: np.ndarray
    place: np.ndarray
    expert: np.ndarray


@compiled
def shortlist(size: int, limit: float) -> Shortlist:
    """An empty one for at most ``size`` guests, all cheaper than ``limit``."""
    return Shortlist(np.full(size, limit), np.empty(size, np.int64), np.full(size, -1))


@borrowing
def empty(best: Shortlist, limit: float) -> None:
    """As it was new."""
    for i in range(len(best.cost)):
        best.cost[i], best.expert[i] = limit, -1


@borrowing
def offer(best: Shortlist, cost: float, place: int, expert: int) -> None:
    """Take a guest in, if it is cheaper than the last; that one goes when the list is full."""
    at = len(best.cost) - 1
    if not cost < best.cost[at]:
        return
    while at > 0 and best.cost[at - 1] > cost:
        best.cost[at], best.place[at], best.expert[at] = best.cost[at - 1], best.place[at - 1], best.expert[at - 1]
        at -= 1
    best.cost[at], best.place[at], best.expert[at] = cost, place, expert


@borrowing
def listed(best: Shortlist) -> int:
    """How many guests there are."""
    found = 0
    while found < len(best.expert) and best.expert[found] >= 0:
        found += 1
    return found
