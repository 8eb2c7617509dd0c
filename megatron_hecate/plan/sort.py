"""Order among few numbers, without branches: what is compared is new in every call, so no processor guesses it, and a
wrong guess takes as long as comparing with a whole vector register. Compiled.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled

FEW: int = 192  # numbers that are sorted faster by comparing each with each than by a quicksort


@compiled
def in_order(keys: np.ndarray) -> np.ndarray:
    """[N] of ``keys`` [N] int64, no two of them equal, the smallest first."""
    if len(keys) > FEW:
        return np.sort(keys)
    ordered = np.empty_like(keys)
    for i in range(len(keys)):
        smaller = 0
        for k in range(len(keys)):
            smaller += keys[k] < keys[i]
        ordered[smaller] = keys[i]
    return ordered


@borrowing
def first_largest(values: np.ndarray) -> int:
    """Where ``values`` [N > 0] int64 are largest; of several places, the first."""
    largest = values[0]
    for i in range(len(values)):
        largest = max(largest, values[i])
    first = len(values)
    for i in range(len(values)):
        first = min(first, i if values[i] == largest else len(values))
    return first
