"""Order among few numbers. Oracle: numpy's sort and argmax. If they were wrong, plans would be bad."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_hecate.plan.sort import FEW, first_largest, in_order

EXTREMES = [-(1 << 62), (1 << 62), 0, -1, 1]


@pytest.mark.parametrize("number", [0, 1, 2, 3, 8, 63, 64, 65, FEW - 1, FEW, FEW + 1, 500])
def test_keys_are_sorted(number: int) -> None:
    rng = np.random.default_rng(number)
    for _ in range(20):
        keys = np.unique(np.r_[rng.integers(-(1 << 61), 1 << 61, 2 * number + 2), EXTREMES])
        keys = rng.permutation(keys)[:number]
        before = keys.copy()
        np.testing.assert_array_equal(in_order(keys), np.sort(keys))
        np.testing.assert_array_equal(keys, before)


@pytest.mark.parametrize("number", [1, 2, 3, 8, 63, 64, 65, 500])
def test_of_several_largest_the_first_counts(number: int) -> None:
    rng = np.random.default_rng(number)
    for values in (rng.integers(0, 3, number), rng.integers(-(1 << 61), 1 << 61, number), np.full(number, -(1 << 62))):
        assert first_largest(values) == np.argmax(values)
