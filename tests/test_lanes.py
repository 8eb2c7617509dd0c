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
    every,
    kept,
    least,
    load,
    positive,
    rows_of,
    squared,
    store,
    whole,
    zeros,
)

INF = float("inf")
MOST = 2**15 - 1


def _tokens() -> np.ndarray:
    """[7, 32] as the planner has them: sums of two are in range. Equal ones, signs, zeros, the largest."""
    rng = np.random.default_rng(0)
    rows = rng.integers(-MOST // 2, MOST // 2, (7, LANES)).astype(np.int16)
    rows[1] = rows[0]
    rows[2, ::2] = rows[0, ::2]
    rows[3] = 0
    rows[4] = rng.integers(-1, 2, LANES)
    rows[5, ::3], rows[5, 1::3] = MOST // 2, -MOST // 2
    return rows


def _floats() -> np.ndarray:
    """[5, 32] fractions, large numbers, zeros of both signs and infinities."""
    rows = np.random.default_rng(0).normal(0, 1, (5, LANES)).astype(np.float32)
    rows[1] *= 1e30
    rows[2], rows[3] = 0.0, -0.0
    rows[4, :4] = INF, -INF, 0.0, -0.0
    return rows


def _sum(rows: np.ndarray, i: int, k: int) -> np.ndarray:
    return load(rows, i) + load(rows, k)


def _difference(rows: np.ndarray, i: int, k: int) -> np.ndarray:
    return load(rows, i) - load(rows, k)


def _least(rows: np.ndarray, i: int, k: int) -> np.ndarray:
    return least(load(rows, i), load(rows, k))


def _positive(rows: np.ndarray, i: int, k: int) -> np.ndarray:
    return positive(load(rows, i)) + positive(load(rows, k))


def _kept(rows: np.ndarray, i: int, k: int) -> np.ndarray:
    some, others = below(load(rows, i), load(rows, k)), ~below(zeros(), load(rows, k))
    return kept(load(rows, i), some) + kept(load(rows, k), others)


def _product(rows: np.ndarray, i: int, k: int) -> np.ndarray:
    return load(rows, i) * load(rows, k)


def _every(rows: np.ndarray, i: int, k: int) -> np.ndarray:
    return load(rows, i) + every(rows[k, 3])


OF_ROWS = [(_tokens, function) for function in (_sum, _difference, _least, _positive, _kept)]
OF_ROWS += [(_floats, function) for function in (_sum, _product, _positive, _every)]


@pytest.mark.parametrize(("rows", "function"), OF_ROWS, ids=lambda f: f.__name__)
def test_every_lane_is_computed_as_python_does(
    rows: Callable[[], np.ndarray], function: Callable[..., np.ndarray]
) -> None:
    rows, compiled = rows(), numba.njit(function)

    @numba.njit
    def written(rows: np.ndarray, i: int, k: int, out: np.ndarray) -> None:
        store(out, 1, compiled(rows, i, k))

    with np.errstate(invalid="ignore", over="ignore"):
        for i in range(len(rows)):
            for k in range(len(rows)):
                out = np.full((3, LANES), 7, rows.dtype)
                written(rows, i, k, out)
                expected = function(rows, i, k)
                assert expected.dtype == rows.dtype
                np.testing.assert_array_equal(out[1], expected, err_msg=f"rows {i} and {k}")
                assert (out[[0, 2]] == 7).all(), "neighbouring rows are left alone"


def test_floats_become_tokens_rounded_down() -> None:
    rows = np.array([np.linspace(0, 15.5, LANES), np.arange(LANES) * 1057.0, np.linspace(MOST - 1, MOST, LANES)])
    rows = rows.astype(np.float32)

    @numba.njit
    def compiled(rows: np.ndarray, out: np.ndarray) -> None:
        for i in range(len(rows)):
            store(out, i, whole(load(rows, i)))

    out = np.empty(rows.shape, np.int16)
    compiled(rows, out)
    np.testing.assert_array_equal(out, np.floor(rows.astype(float)))
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
    rows = _tokens()
    compiled = numba.njit(lambda rows, i, k: below(load(rows, i), load(rows, k)))
    for i in range(len(rows)):
        for k in range(len(rows)):
            expected = sum(1 << lane for lane in range(LANES) if rows[i, lane] < rows[k, lane])
            assert compiled(rows, i, k) == below(rows[i], rows[k]) == expected


def test_squares_are_summed_exactly() -> None:
    rows = np.vstack([_tokens(), np.full((1, LANES), MOST), np.full((1, LANES), -MOST)]).astype(np.int16)
    compiled = numba.njit(lambda rows, i: squared(load(rows, i)))
    for i, row in enumerate(rows.tolist()):
        assert compiled(rows, i) == squared(rows[i]) == sum(tokens**2 for tokens in row)


@pytest.mark.parametrize("kind", [np.float32, np.int16])
@pytest.mark.parametrize("number", [1, 7, 64])
def test_rows_begin_where_cache_lines_do(number: int, kind: type) -> None:
    for make in (rows_of, rows_of.py_func):
        kept_alive = [make(number, kind) for _ in range(20)]
        for i, rows in enumerate(kept_alive):
            assert rows.shape == (number, LANES) and rows.dtype == kind and rows.flags.c_contiguous
            assert rows.ctypes.data % CACHE_LINE == 0
            rows[:] = i
        assert all((rows == i).all() for i, rows in enumerate(kept_alive))


def test_a_row_of_something_else_is_refused_when_compiled() -> None:
    with pytest.raises(numba.TypingError):
        numba.njit(lambda row: load(row, 0))(np.zeros(LANES, np.float32))
    with pytest.raises(numba.TypingError):
        numba.njit(lambda rows: load(rows, 0))(np.zeros((2, LANES)))
    with pytest.raises(numba.TypingError):
        numba.njit(lambda rows: below(load(rows, 0), load(rows, 1)))(np.zeros((2, LANES), np.float32))


def test_a_row_that_there_is_not_is_found_where_that_is_asked_for() -> None:
    compiled = numba.njit(boundscheck=True)(lambda rows, i: squared(load(rows, i)))
    assert compiled(_tokens(), 6) == squared(_tokens()[6])
    for row in (7, -1, 1 << 40):
        with pytest.raises(IndexError):
            compiled(_tokens(), row)
    with pytest.raises(IndexError):
        compiled(np.zeros((4, LANES // 2), np.int16), 1)
