"""32 numbers as one value: float32, one of each scenario, that compiled code keeps in vector registers.

A loop over a short row of an array is compiled to more code that asks whether arrays overlap than code that computes;
a value of its own needs none of it. LLVM makes as many registers of it as the machine wants. What each operation does
is written in Python; without the compiler that is what runs.

Numba's extension interface: https://numba.readthedocs.io/en/stable/extending/low-level.html
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import lower_builtin, models, register_model

from megatron_hecate.plan.compiled import compiled

LANES: int = 32
CACHE_LINE: int = 64  # bytes. A row that begins elsewhere is in one line more, and takes a third longer
FLOAT_BYTES: int = 4
FLOATS = ir.VectorType(ir.FloatType(), LANES)
DOUBLES = ir.VectorType(ir.DoubleType(), LANES)
BITS = ir.VectorType(ir.IntType(1), LANES)


@compiled
def rows_of(number: int) -> np.ndarray:
    """[number, 32] float32 that begin where cache lines do; not set to anything."""
    floats = np.empty(number * LANES + CACHE_LINE // FLOAT_BYTES, np.float32)
    ahead = -floats.ctypes.data % CACHE_LINE // FLOAT_BYTES
    return floats[ahead : ahead + number * LANES].reshape(number, LANES)


def zeros() -> np.ndarray:
    """[32] of 0."""
    return np.zeros(LANES, np.float32)


def every(number: np.float32) -> np.ndarray:
    """[32] of ``number``."""
    return np.full(LANES, number, np.float32)


def load(rows: np.ndarray, row: int) -> np.ndarray:
    """A row of ``rows`` [N, 32] float32, C-contiguous. As with all arrays of compiled code, that there is such a row is
    checked only with ``NUMBA_BOUNDSCHECK=1``."""
    return rows[row].copy()


def both_ways(rows: np.ndarray, row: int) -> np.ndarray:
    """A row of ``rows`` [N, 8] float32, the same negative, and 16 zeros."""
    return np.concatenate((rows[row], -rows[row], np.zeros(LANES // 2, np.float32)))


def store(rows: np.ndarray, row: int, lanes: np.ndarray) -> None:
    """Write a row of such ``rows``."""
    rows[row] = lanes


def least(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The smaller one, lane by lane."""
    return np.minimum(a, b)


def positive(a: np.ndarray) -> np.ndarray:
    """What is above 0, else 0."""
    return np.maximum(a, np.float32(0))


def whole(a: np.ndarray) -> np.ndarray:
    """The nearest integer of numbers from 0 to 2^23, halves up."""
    return (a + np.float32(0.5)).astype(np.int32).astype(np.float32)


def below(a: np.ndarray, b: np.ndarray) -> int:
    """Where ``a < b``: bit i stands for lane i."""
    return int(np.packbits(a < b, bitorder="little").view("<u4")[0])


def kept(a: np.ndarray, bits: int) -> np.ndarray:
    """``a`` where ``bits`` are set, else 0."""
    return np.where(bits >> np.arange(LANES) & 1, a, np.float32(0))


def dot(a: np.ndarray, b: np.ndarray) -> float:
    """The sum of products, in float64: of integers below 2^24 whose sum stays below 2^53 it is exact."""
    return _halved(a.astype(np.float64) * b)


def rough_dot(a: np.ndarray, b: np.ndarray) -> float:
    """The same in float32, in half the time: to compare what need not be compared exactly."""
    return _halved(a * b)


def _halved(products: np.ndarray) -> float:
    """The sum of the halves, of their halves, and so on."""
    while len(products) > 1:
        products = products[: len(products) // 2] + products[len(products) // 2 :]
    return float(products[0])


class Lanes(types.Type):
    """The type of such a value in compiled code."""

    def __init__(self) -> None:
        super().__init__(name=f"float32 x {LANES}")


@register_model(Lanes)
class _InRegisters(models.PrimitiveModel):
    def __init__(self, data_models: Any, its_type: types.Type) -> None:
        super().__init__(data_models, its_type, FLOATS)


ROWS = types.Array(types.float32, 2, "C")
ONE = Lanes()
Values = list[ir.Value]
Builder = ir.IRBuilder


def _compiles(function: Callable, *arguments: types.Type, to: types.Type) -> Callable[[Callable], Callable]:
    """Decorates what generates the code of ``function`` of ``arguments``, which returns ``to``."""

    @infer_global(function)
    class _Template(AbstractTemplate):
        def generic(self, args: tuple[types.Type, ...], _: dict[str, types.Type]) -> Any:
            args = tuple(types.int64 if isinstance(a, types.Integer) else a for a in args)
            return to(*args) if args == arguments else None

    return lower_builtin(function, *arguments)


def _zero() -> ir.Constant:
    return ir.Constant(FLOATS, [0.0] * LANES)


def _places(which: Sequence[int]) -> ir.Constant:
    """Of the lanes of two values, for a third."""
    return ir.Constant(ir.VectorType(ir.IntType(32), len(which)), list(which))


def _row(context: Any, builder: Builder, rows_type: types.Array, values: Values, row: ir.Type = FLOATS) -> ir.Value:
    """Where a row begins."""
    rows = context.make_array(rows_type)(context, builder, values[0])
    column = ir.Constant(values[1].type, 0)
    place = cgutils.get_item_pointer(
        context, builder, rows_type, rows, [values[1], column], boundscheck=context.enable_boundscheck
    )
    return builder.bitcast(place, row.as_pointer())


@_compiles(zeros, to=ONE)
def _(_: Any, __: Builder, ___: Any, ____: Values) -> ir.Value:
    return _zero()


@_compiles(every, types.float32, to=ONE)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    first = ir.Constant(ir.IntType(32), 0)
    lanes = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), values[0], first)
    return builder.shuffle_vector(lanes, lanes, _places([0] * LANES))


@_compiles(load, ROWS, types.int64, to=ONE)
def _(context: Any, builder: Builder, signature: Any, values: Values) -> ir.Value:
    return builder.load(_row(context, builder, signature.args[0], values), align=FLOAT_BYTES)


@_compiles(both_ways, ROWS, types.int64, to=ONE)
def _(context: Any, builder: Builder, signature: Any, values: Values) -> ir.Value:
    row = ir.VectorType(ir.FloatType(), LANES // 4)
    one = builder.load(_row(context, builder, signature.args[0], values, row), align=FLOAT_BYTES)
    zero = ir.Constant(row, [0.0] * (LANES // 4))
    two = builder.shuffle_vector(one, builder.fsub(zero, one), _places(range(LANES // 2)))
    zeros_too = ir.Constant(two.type, [0.0] * (LANES // 2))
    return builder.shuffle_vector(two, zeros_too, _places(range(LANES)))


@_compiles(store, ROWS, types.int64, ONE, to=types.void)
def _(context: Any, builder: Builder, signature: Any, values: Values) -> ir.Value:
    builder.store(values[2], _row(context, builder, signature.args[0], values), align=FLOAT_BYTES)
    return context.get_dummy_value()


@_compiles(operator.add, ONE, ONE, to=ONE)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    return builder.fadd(*values)


@_compiles(operator.sub, ONE, ONE, to=ONE)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    return builder.fsub(*values)


@_compiles(operator.mul, ONE, ONE, to=ONE)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    return builder.fmul(*values)


@_compiles(least, ONE, ONE, to=ONE)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    return builder.select(builder.fcmp_ordered("<", *values), *values)


@_compiles(positive, ONE, to=ONE)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", values[0], _zero()), values[0], _zero())


@_compiles(whole, ONE, to=ONE)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    halves = builder.fadd(values[0], ir.Constant(FLOATS, [0.5] * LANES))
    return builder.sitofp(builder.fptosi(halves, ir.VectorType(ir.IntType(32), LANES)), FLOATS)


@_compiles(below, ONE, ONE, to=types.int64)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    bits = builder.bitcast(builder.fcmp_ordered("<", *values), ir.IntType(LANES))
    return builder.zext(bits, ir.IntType(64))


@_compiles(kept, ONE, types.int64, to=ONE)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    bits = builder.bitcast(builder.trunc(values[1], ir.IntType(LANES)), BITS)
    return builder.select(bits, values[0], _zero())


@_compiles(dot, ONE, ONE, to=types.float64)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    return _sum(builder, builder.fmul(*(builder.fpext(lanes, DOUBLES) for lanes in values)))


@_compiles(rough_dot, ONE, ONE, to=types.float64)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    return builder.fpext(_sum(builder, builder.fmul(*values)), ir.DoubleType())


def _sum(builder: Builder, products: ir.Value) -> ir.Value:
    """In the order of `_halved`."""
    half = LANES
    while half > 1:
        half //= 2
        nothing = ir.Constant(products.type, ir.Undefined)
        halves = (builder.shuffle_vector(products, nothing, _places(range(i, i + half))) for i in (0, half))
        products = builder.fadd(*halves)
    return builder.extract_element(products, ir.Constant(ir.IntType(32), 0))
