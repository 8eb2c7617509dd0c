"""32 numbers as one value in compiled code.

Oracle: the same functions in Python, which numpy computes. If the generated code were wrong, plans would be judged
wrongly, and differently on machines without the compiler.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import pytest

from megatron_hecate.plan.lanes import (
    CACHE_LINE,
    LANES,
    below,
    both_ways,
    dot,
    every,
    kept,
    least,
    load,
    positive,
    rough_dot,
    rows_of,
    store,
    whole,
    zeros,
)

INF = float("inf")


def _rows() -> np.ndarray:
    """[8, 32] integers as the planner has them, equal ones, signs, zeros of both signs, fractions and infinities."""
    rng = np.random.default_rng(0)
    rows = rng.integers(-(1 << 24), 1 << 24, (8, LANES)).astype(np.float32)
    rows[1] = rows[0]
    rows[2, ::2] = rows[0, ::2]
    rows[3] = 0.0
    rows[4] = -0.0
    rows[5] = rng.normal(0, 1, LANES)
    rows[6, :4] = INF, -INF, 0.0, -0.0
    return rows


def _sum(rows: np.ndarray, i: int, k: int) -> np.ndarray:
    return load(rows, i) + load(rows, k)


def _difference(rows: np.ndarray, i: int, k: int) -> np.ndarray:
    return load(rows, i) - load(rows, k)


def _least(rows: np.ndarray, i: int, k: int) -> np.ndarray:
    return least(load(rows, i), load(rows, k))


def _positive(rows: np.ndarray, i: int, k: int) -> np.ndarray:
    return positive(load(rows, i)) + positive(zeros() - load(rows, k))


def _kept(rows: np.ndarray, i: int, k: int) -> np.ndarray:
    some, others = below(load(rows, i), load(rows, k)), ~below(zeros(), load(rows, k))
    return kept(load(rows, i), some) + kept(load(rows, k), others)


def _product(rows: np.ndarray, i: int, k: int) -> np.ndarray:
    return load(rows, i) * load(rows, k)


def _every(rows: np.ndarray, i: int, k: int) -> np.ndarray:
    return load(rows, i) + every(rows[k, 3])


OF_ROWS = [_sum, _difference, _product, _least, _positive, _kept, _every]


@pytest.mark.parametrize("function", OF_ROWS, ids=lambda f: f.__name__)
def test_every_lane_is_computed_as_python_does(function: Callable[..., np.ndarray]) -> None:
    rows, compiled = _rows(), numba.njit(function)

    @numba.njit
    def written(rows: np.ndarray, i: int, k: int, out: np.ndarray) -> None:
        store(out, 1, compiled(rows, i, k))

    with np.errstate(invalid="ignore"):
        for i in range(len(rows)):
            for k in range(len(rows)):
                out = np.full((3, LANES), np.float32(7))
                written(rows, i, k, out)
                np.testing.assert_array_equal(out[1], function(rows, i, k), err_msg=f"rows {i} and {k}")
                assert (out[[0, 2]] == 7).all(), "neighbouring rows are left alone"


def test_numbers_become_the_nearest_integers() -> None:
    rows = np.array([np.linspace(0, 15.5, LANES), np.arange(LANES) * 260_000.25], np.float32)

    @numba.njit
    def compiled(rows: np.ndarray, out: np.ndarray) -> None:
        for i in range(len(rows)):
            store(out, i, whole(load(rows, i)))

    out = np.empty_like(rows)
    compiled(rows, out)
    np.testing.assert_array_equal(out, np.floor(rows.astype(float) + 0.5))
    np.testing.assert_array_equal(out, [whole(row) for row in rows])


def test_eight_numbers_both_ways_are_half_of_the_lanes() -> None:
    rows = np.random.default_rng(0).normal(0, 1, (3, LANES // 4)).astype(np.float32)

    @numba.njit
    def compiled(rows: np.ndarray, i: int, out: np.ndarray) -> None:
        store(out, 0, both_ways(rows, i))

    for i in range(len(rows)):
        out = np.full((1, LANES), np.float32(7))
        compiled(rows, i, out)
        np.testing.assert_array_equal(out[0], [*rows[i], *-rows[i], *[0] * (LANES // 2)])
        np.testing.assert_array_equal(out[0], both_ways(rows, i))


def test_bits_say_where_one_is_below_the_other() -> None:
    rows = _rows()
    compiled = numba.njit(lambda rows, i, k: below(load(rows, i), load(rows, k)))
    for i in range(len(rows)):
        for k in range(len(rows)):
            expected = sum(1 << lane for lane in range(LANES) if rows[i, lane] < rows[k, lane])
            assert compiled(rows, i, k) == below(rows[i], rows[k]) == expected


def test_products_of_integers_are_summed_exactly_and_others_in_one_order() -> None:
    rows = _rows()
    compiled = numba.njit(lambda rows, i, k: dot(load(rows, i), load(rows, k)))
    whole = rows[:3].astype(int).tolist()
    for i in range(3):
        for k in range(3):
            exact = sum(a * b for a, b in zip(whole[i], whole[k], strict=True))
            assert compiled(rows, i, k) == dot(rows[i], rows[k]) == exact
    assert compiled(rows, 5, 0) == dot(rows[5], rows[0])  # fractions: bit for bit
    assert compiled(rows, 5, 5) == pytest.approx(float((rows[5].astype(float) ** 2).sum()), rel=1e-12)


def test_rough_products_are_summed_in_float32_in_one_order() -> None:
    rows = _rows()
    compiled = numba.njit(lambda rows, i, k: rough_dot(load(rows, i), load(rows, k)))
    for i in range(6):
        for k in range(6):
            assert compiled(rows, i, k) == rough_dot(rows[i], rows[k])  # bit for bit
            assert compiled(rows, i, i) == pytest.approx(dot(rows[i], rows[i]), rel=1e-6)


@pytest.mark.parametrize("number", [1, 7, 64])
def test_rows_begin_where_cache_lines_do(number: int) -> None:
    for make in (rows_of, rows_of.py_func):
        kept_alive = [make(number) for _ in range(20)]
        for i, rows in enumerate(kept_alive):
            assert rows.shape == (number, LANES) and rows.dtype == np.float32 and rows.flags.c_contiguous
            assert rows.ctypes.data % CACHE_LINE == 0
            rows[:] = i
        assert all((rows == i).all() for i, rows in enumerate(kept_alive))


def test_a_row_of_something_else_is_refused_when_compiled() -> None:
    with pytest.raises(numba.TypingError):
        numba.njit(lambda row: load(row, 0))(np.zeros(LANES, np.float32))
    with pytest.raises(numba.TypingError):
        numba.njit(lambda rows: load(rows, 0))(np.zeros((2, LANES)))
