"""What `calibrate` refuses, and what it says then.

Oracle: the limits in its docstring. If a bad load, price or world were taken, late guests would be nonsense.
"""

from __future__ import annotations

import numpy as np
import pytest
from random_plans import one_node

from megatron_hecate.plan import Placement, calibrate


@pytest.mark.parametrize(
    ("total", "message"),
    [
        (np.array([1, 2, 3]), r"shape \(3,\), expected \[4\]"),
        (np.array([[1, 2, 3, 4]]), r"shape \(1, 4\), expected \[4\]"),
        (np.array(7), r"shape \(\), expected \[4\]"),
        (np.array([1.0, 2, 3, 4]), "integers >= 0, got dtype float64"),
        (np.array([1, 2, -3, 4]), "minimum -3"),
    ],
)
def test_bad_loads_say_what_they_are(total: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(total, Placement.initial(4, 2, num_slots=1), one_node(2), copy_tokens=1.0, most_late=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("copy_tokens", -1.0), ("copy_tokens", float("nan")), ("across_tokens", -1.0), ("routing_tokens", -1.0),
     ("routing_tokens", float("nan")), ("most_late", -1)],
)  # fmt: skip
def test_bad_limits_and_prices_say_what_they_are(name: str, value: float) -> None:
    limits = dict(copy_tokens=1.0, most_late=1) | {name: value}
    with pytest.raises(ValueError, match=f"{name}={value}.*must be 0 or more"):
        calibrate(np.ones(4, dtype=int), Placement.initial(4, 2, num_slots=1), one_node(2), **limits)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_world_of_another_size_is_refused(num_ranks: int) -> None:
    placement = Placement.initial(4, 2, num_slots=1)
    with pytest.raises(ValueError, match=f"world has {num_ranks} ranks, the placement 2"):
        calibrate(np.ones(4, dtype=int), placement, one_node(num_ranks), copy_tokens=1.0, most_late=1)
