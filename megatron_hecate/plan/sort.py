"""Order among few numbers, without branches: what is compared is new in every call, so no processor guesses it, and a
wrong guess takes as long as comparing with a whole vector register. Compiled.
"""

from __future__ import annotations

import numpy as np

from megatron_hecate.plan.compiled import borrowing, compiled

INDEX: int = 1 << 20  # more than there are ranks or experts; keys to sort by are value * INDEX + index
NONE: int = -(1 << 62)  # less than any key
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
def key(value: int, index: int) -> int:
    """A number that compares as ``value`` does, between -2^42 and 2^42; of equal ones the lower index is larger. It is
    read back by `value_of` and `index_of`."""
    return value * INDEX + INDEX - 1 - index


@borrowing
def value_of(key: int) -> int:
    return key // INDEX


@borrowing
def index_of(key: int) -> int:
    return INDEX - 1 - key % INDEX


@borrowing
def largest(keys: np.ndarray) -> int:
    """Of ``keys`` [N > 0]."""
    found = keys[0]
    for i in range(len(keys)):
        found = max(found, keys[i])
    return found
