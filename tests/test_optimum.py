"""The bound that no placement goes below: `bench/optimum.py`.

Oracle: every placement of small layers, one by one. If the program allowed too little, planners would be excused for
what they could do better.
"""

from __future__ import annotations

import numpy as np
import pytest
from optimum import least_possible
from random_plans import best_largest, some_total


@pytest.mark.parametrize("seed", range(30))
def test_the_bound_is_the_best_of_all_placements(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, num_experts, slots = int(rng.integers(1, 4)), int(rng.integers(1, 7)), int(rng.integers(1, 3))
    home = rng.integers(0, num_ranks, num_experts)
    total = some_total(rng, num_experts)
    best = best_largest(total, home, [slots] * num_ranks)
    found = least_possible(total, home, num_ranks=num_ranks, slots=slots)
    assert best * (1 - 2e-4) <= found <= best


def test_nothing_to_compute() -> None:
    assert least_possible(np.zeros(4, np.int64), np.array([0, 0, 1, 1]), num_ranks=2, slots=1) == 0
