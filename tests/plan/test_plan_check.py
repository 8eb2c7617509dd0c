"""The checker of placements against placements that are wrong in one known way.

Its oracle is the violation we planted: every rule has a placement that breaks it, and the error must name the expert,
rank and values. Fingerprints are compared with bytes packed by hand.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hecate.plan import Placement

pytestmark = pytest.mark.fast


def _unchecked(home: list, table: list) -> Placement:
    """A placement that its own constructor would refuse."""
    return Placement.trusted(np.array(home), np.array(table))


def _placement() -> Placement:
    """Four experts on two ranks, a replica of expert 0 on rank 1."""
    return Placement(home=np.array([0, 0, 1, 1]), table=np.array([[0, 1, -1], [2, 3, 0]]))


def test_a_valid_placement_passes() -> None:
    _placement().check()
    _placement().check(num_slots=1)
    _placement().homes_only.check(num_slots=0)


@pytest.mark.parametrize(
    ("home", "table", "message"),
    [
        ([0, 1.5], [[0], [1]], "home must be integers, got dtype float64"),
        ([0, 1], [[0.0], [1.0]], "table must be integers, got dtype float64"),
        ([0, 2], [[0], [1]], r"home must name ranks 0 to 1, got \[0, 2\]"),
        ([0, 1], [[0, 2], [1, -1]], "table must name experts 0 to 1 or -1"),
        ([0, 1], [[0, -2], [1, -1]], "table must name experts 0 to 1 or -1"),
        ([0, 1], [[0, -1], [0, -1]], "expert 1 has its home on rank 1, whose slots are"),
        ([0, 1], [[0, 0], [1, -1]], r"rank 0 holds an expert twice: slots \[0, 0\]"),
        ([0, 1], [[0, -1, -1], [1, 0, 0]], "rank 1 holds an expert twice"),
    ],
)
def test_a_placement_that_breaks_a_rule(home: list, table: list, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        _unchecked(home, table).check()


def test_more_replicas_than_slots() -> None:
    with pytest.raises(AssertionError, match="rank 1 holds 1 replicas, num_slots=0"):
        _placement().check(num_slots=0)


def test_stale_views_are_found() -> None:
    stale = _placement()
    stale.__dict__["holders"] = np.zeros((4, 2), dtype=bool)
    with pytest.raises(
        AssertionError, match=r"holders\[0, 0\] is False, but rank 0 has slots \[0, 1, -1\]"
    ):
        stale.check()
    stale = _placement()
    stale.__dict__["replicas"] = ((1, 1, 2),)
    with pytest.raises(
        AssertionError, match=r"replicas are \(\(1, 1, 2\),\), the table says \(\(0, 1, 2\),\)"
    ):
        stale.check()


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(["home", "table"]), st.data())
def test_any_other_value_is_another_fingerprint(name: str, data: st.DataObject) -> None:
    arrays = {"home": _placement().home.copy(), "table": _placement().table.copy()}
    place = tuple(data.draw(st.integers(0, size - 1)) for size in arrays[name].shape)
    arrays[name][place] += data.draw(st.integers(1, 5))
    assert Placement.trusted(**arrays).fingerprint != _placement().fingerprint


@pytest.mark.parametrize("dtype", ["i4", "u2", "u8", ">i8", "i1"])
def test_width_byte_order_and_memory_layout_do_not_matter(dtype: str) -> None:
    placement = _placement()
    other = Placement(
        home=placement.home.astype(dtype), table=np.asfortranarray(placement.table.astype("i2"))
    )
    assert other.fingerprint == placement.fingerprint


def test_shape_counts() -> None:
    two, three = ([[0, 1], [-1, -1], [-1, -1]], [[0, 1, -1], [-1, -1, -1]])  # the same bytes
    assert _unchecked([0, 0], two).fingerprint != _unchecked([0, 0], three).fingerprint


def test_the_fingerprint_is_the_same_everywhere() -> None:
    # a literal from the documented bytes, packed by hand: another Python, numpy or machine must get the same
    assert _placement().fingerprint == -5153952438187840267


def test_fractions_have_no_fingerprint() -> None:
    with pytest.raises(TypeError, match="float64"):
        print(_unchecked([0.0], [[0.0]]).fingerprint)
