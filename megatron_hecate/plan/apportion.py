"""How many copies each expert gets. Compiled."""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled
from megatron_hecate.plan.links import by_home


@borrowing
def _fitting(load: np.ndarray, most: np.ndarray, each: int) -> int:
    """Copies that fit when each stands for ``each`` tokens: sum of ``load // each``, at most ``most``.

    Divided as float64, which is several times faster and exact, since a quotient of integers below 2^52 is off an
    integer by more than its rounding.
    """
    fitting = 0
    for e in range(len(load)):
        fitting += min(most[e], np.int64(load[e] / each))
    return fitting


@compiled
def share_out(forecast: np.ndarray, most: np.ndarray, copies: int) -> np.ndarray:
    """[E] copies of each expert: ``copies`` of them, each to the expert of highest load per holder so far.

    That is D'Hondt's apportionment, by bisection on the load per holder at which slots run out. No expert gets more
    than ``most`` [E], one without load gets none; ties go to the lowest index.
    """
    given = np.zeros(len(forecast), np.int64)
    _share_out(forecast.astype(np.float64), most, copies, given)
    return given


@borrowing
def _share_out(load: np.ndarray, most: np.ndarray, copies: int, given: np.ndarray) -> None:
    """`share_out` of integers, as float64, into ``given`` [E], which is 0. Times copies, loads are below 2^53."""
    total = np.int64(0)
    for tokens in load:
        total += np.int64(tokens)
    if copies <= 0 or total == 0:
        return
    high = total // copies + 1  # more than `copies` fit at `low`, or `low` is 0; at most `copies` at `high`
    low = high // 2
    fitting = -1
    while low > 0:
        fitting = _fitting(load, most, low)
        if fitting > copies:
            break
        high, low = low, low // 2
        if fitting == copies:
            break
    while fitting != copies and high - low > 1:
        middle = (low + high) // 2
        fitting = _fitting(load, most, middle)
        if fitting > copies:
            low = middle
        else:
            high = middle
    left = copies
    for e in range(len(load)):
        given[e] = min(most[e], np.int64(load[e] / high))
        left -= given[e]
    while left > 0:
        best = -1
        for e in range(len(load)):
            if given[e] == most[e] or load[e] == 0:
                continue
            if best < 0 or load[e] * (given[best] + 1) > load[best] * (given[e] + 1):
                best = e
        if best < 0:
            break
        given[best] += 1
        left -= 1


@compiled
def most_copies(forecast: np.ndarray, home: np.ndarray, num_ranks: int, egress: int) -> np.ndarray:
    """[E] copies an expert may have; a home's egress goes to its experts by load."""
    most = np.full(len(home), num_ranks - 1, np.int64)  # the same for all, so in any order
    if egress >= (num_ranks - 1) * len(home):
        return most
    first, experts = by_home(home, num_ranks)
    load, given = np.empty(len(home)), np.zeros(len(home), np.int64)
    for i in range(len(home)):
        load[i] = forecast[experts[i]]
    for r in range(num_ranks):
        begin, end = first[r], first[r + 1]
        if (end - begin) * (num_ranks - 1) > egress:
            _share_out(load[begin:end], most[begin:end], egress, given[begin:end])
        else:
            given[begin:end] = num_ranks - 1
    for i in range(len(home)):
        most[experts[i]] = given[i]
    return most
