"""Loads that may come instead of the forecast, from how far forecasts were off before. Compiled."""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled


@compiled
def drifted(roots: np.ndarray, errors: np.ndarray, known: int, bursts: int, burst: float) -> np.ndarray:
    """The forecast with each of its last errors, added and taken off, and bursts of single experts.

    Args:
        roots: [E] square roots of the forecast, in any unit.
        errors: [E, at least ``known``] of square roots, at length 1; the first ``known`` are read.
        known: at least 1.
        bursts: how many; every expert is in one of them, neighbours in different ones.
        burst: how much more it gets, in root mean square errors.

    Returns:
        [E, 2 * known + bursts] float32 loads, each of a sum about 1, or of 0 where the forecast and the errors are.
    """
    num_experts = len(roots)
    length, squares = 0.0, np.zeros(known)
    for e in range(num_experts):
        length += roots[e] * roots[e]
        for i in range(known):
            squares[i] += errors[e, i] * errors[e, i]
    each = 1.0 / np.sqrt(length) if length > 0.0 else 0.0
    more = burst * np.sqrt(squares.sum() / (num_experts * known))
    loads = np.empty((num_experts, 2 * known + bursts), np.float32)  # as precise as the planner counts
    for e in range(num_experts):
        root = roots[e] * each
        for i in range(known):
            above, below = max(0.0, root + errors[e, i]), max(0.0, root - errors[e, i])
            loads[e, i], loads[e, known + i] = above * above, below * below
        for i in range(2 * known, 2 * known + bursts):
            loads[e, i] = root * root
        loads[e, 2 * known + e * 5 % bursts] = (root + more) ** 2
    return loads


@borrowing
def are_loads(tokens: np.ndarray) -> bool:
    """Whether ``tokens`` [N] are finite and at least 0; NaN is neither."""
    bad = np.int32(0)  # counted, which vector instructions do, and more of them at once in 32 bits
    for i in range(len(tokens)):
        bad += np.int32(0) if (tokens[i] >= 0.0) & (tokens[i] < np.inf) else np.int32(1)
    return bad == 0
