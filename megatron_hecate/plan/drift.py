"""Loads that may come instead of the forecast, from how far forecasts were off before. Compiled."""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled
from megatron_hecate.plan.lanes import LANES, both_ways, every, positive, rows_of, store

ERRORS: int = LANES // 4  # of the last iterations, each added and taken off
BURSTS: int = LANES - 2 * ERRORS  # scenarios in which experts get more than forecast, each of them in one
BURST: float = 3.0  # how much more, in root mean square errors


@compiled
def drifted(roots: np.ndarray, errors: np.ndarray, squares: float) -> np.ndarray:
    """The forecast with each of its last errors, added and taken off, and with bursts of single experts.

    Args:
        roots: [E] square roots of the forecast, at length 1.
        errors: [E, 8] float32, errors of such roots.
        squares: the mean square of the errors.

    Returns:
        [E, 32] float32 loads, each of a sum about 1, or of 0 where the forecast and the errors are. In those without an
        error experts burst, each in one of them, neighbours in different ones.
    """
    assert errors.shape == (len(roots), ERRORS)
    more = BURST * np.sqrt(squares)
    loads = rows_of(len(roots), np.float32)
    for e in range(len(roots)):
        moved = positive(every(np.float32(roots[e])) + both_ways(errors, e))
        store(loads, e, moved * moved)
        loads[e, LANES - BURSTS + e * 5 % BURSTS] = (roots[e] + more) ** 2
    return loads


@borrowing
def are_loads(tokens: np.ndarray) -> bool:
    """Whether ``tokens`` [N] are finite and at least 0; NaN is neither."""
    bad = np.int32(0)  # counted, which vector instructions do, and more of them at once in 32 bits
    for i in range(len(tokens)):
        bad += np.int32(0) if (tokens[i] >= 0.0) & (tokens[i] < np.inf) else np.int32(1)
    return bad == 0
