"""Order among few numbers. Oracle: numpy's sort and argmax. If they were wrong, plans would be bad."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_hecate.plan.sort import FEW, INDEX, NONE, in_order, index_of, key, largest, value_of

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
def test_the_largest_key_tells_the_first_of_the_largest_values(number: int) -> None:
    rng = np.random.default_rng(number)
    few, many = rng.integers(-1, 2, number), rng.integers(-(1 << 42) + 1, 1 << 42, number)
    for values in (few, many, np.zeros(number, int), np.full(number, 1 - (1 << 42))):
        keys = np.array([key(value, i) for i, value in enumerate(values)])
        found = largest(keys)
        assert found > NONE
        assert (index_of(found), value_of(found)) == (np.argmax(values), values.max())
    assert largest(np.full(number, NONE)) == NONE
    assert index_of(key(-5, INDEX - 1)) == INDEX - 1
