"""32 numbers as one value, one of each scenario, that compiled code keeps in vector registers.

A loop over a short row of an array is compiled to more code that asks whether arrays overlap than code that computes;
a value of its own needs none of it. LLVM makes as many registers of it as the machine wants. There are two kinds:
float32, in which loads are drawn up, and int16, in which tokens are counted: twice as many to a register and to a cache
line, and all sums exact. What each operation does is written in Python; without the compiler that is what runs.

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
FLOAT_VECTOR = ir.VectorType(ir.FloatType(), LANES)
TOKEN_VECTOR = ir.VectorType(ir.IntType(16), LANES)
BITS = ir.VectorType(ir.IntType(1), LANES)


@compiled
def rows_of(number: int, kind: type) -> np.ndarray:
    """[number, 32] of ``kind``, float32 or int16, that begin where cache lines do; not set to anything."""
    line = CACHE_LINE // np.empty(0, kind).itemsize
    rows = np.empty(number * LANES + line, kind)
    ahead = -rows.ctypes.data % CACHE_LINE // rows.itemsize
    return rows[ahead : ahead + number * LANES].reshape(number, LANES)


def zeros() -> np.ndarray:
    """[32] int16 of 0."""
    return np.zeros(LANES, np.int16)


def every(number: np.float32) -> np.ndarray:
    """[32] float32 of ``number``."""
    return np.full(LANES, number, np.float32)


def load(rows: np.ndarray, row: int) -> np.ndarray:
    """A row of ``rows`` [N, 32], C-contiguous. As with all arrays of compiled code, that there is such a row, and that
    rows are of 32, is checked only with ``NUMBA_BOUNDSCHECK=1``."""
    return rows[row].copy()


def both_ways(rows: np.ndarray, row: int) -> np.ndarray:
    """A row of ``rows`` [N, 8] float32, the same negative, and 16 zeros."""
    return np.concatenate((rows[row], -rows[row], np.zeros(LANES // 2, np.float32)))


def store(rows: np.ndarray, row: int, lanes: np.ndarray) -> None:
    """Write a row of such ``rows``."""
    rows[row] = lanes


def least(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The smaller tokens, lane by lane."""
    return np.minimum(a, b)


def positive(a: np.ndarray) -> np.ndarray:
    """What is above 0, else 0."""
    return np.maximum(a, a.dtype.type(0))


def whole(a: np.ndarray) -> np.ndarray:
    """int16 of float32 from 0 to 32767, rounded down."""
    return a.astype(np.int16)


def below(a: np.ndarray, b: np.ndarray) -> int:
    """Where tokens are ``a < b``: bit i stands for lane i."""
    return int(np.packbits(a < b, bitorder="little").view("<u4")[0])


def kept(a: np.ndarray, bits: int) -> np.ndarray:
    """Tokens ``a`` where ``bits`` are set, else 0."""
    return np.where(bits >> np.arange(LANES) & 1, a, np.int16(0))


def squared(a: np.ndarray) -> int:
    """The sum of squares of tokens above -32768."""
    return int(np.dot(a.astype(np.int64), a.astype(np.int64)))


class Lanes(types.Type):
    """The type of such a value in compiled code."""

    def __init__(self, kind: str, vector: ir.VectorType) -> None:
        super().__init__(name=f"{kind} x {LANES}")
        self.vector = vector


@register_model(Lanes)
class _InRegisters(models.PrimitiveModel):
    def __init__(self, data_models: Any, its_type: Lanes) -> None:
        super().__init__(data_models, its_type, its_type.vector)


OF_FLOATS, OF_TOKENS = Lanes("float32", FLOAT_VECTOR), Lanes("int16", TOKEN_VECTOR)
FLOAT_ROWS, TOKEN_ROWS = types.Array(types.float32, 2, "C"), types.Array(types.int16, 2, "C")
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


def _zero(vector: ir.VectorType) -> ir.Constant:
    return ir.Constant(vector, [0] * LANES)


def _places(which: Sequence[int]) -> ir.Constant:
    """Of the lanes of two values, for a third."""
    return ir.Constant(ir.VectorType(ir.IntType(32), len(which)), list(which))


def _row(context: Any, builder: Builder, rows_type: types.Array, values: Values, row: ir.Type) -> ir.Value:
    """Where a row begins; all of them are as long as ``row``, which spares multiplying by a length."""
    rows = context.make_array(rows_type)(context, builder, values[0])
    if context.enable_boundscheck:
        number, length = cgutils.unpack_tuple(builder, rows.shape)
        right = builder.icmp_signed("==", length, ir.Constant(length.type, row.count))
        cgutils.do_boundscheck(context, builder, values[1], builder.select(right, number, ir.Constant(number.type, 0)))
    return builder.gep(builder.bitcast(rows.data, row.as_pointer()), [values[1]])


def _load(context: Any, builder: Builder, signature: Any, values: Values) -> ir.Value:
    rows_type = signature.args[0]
    row = _row(context, builder, rows_type, values, signature.return_type.vector)
    return builder.load(row, align=rows_type.dtype.bitwidth // 8)


def _store(context: Any, builder: Builder, signature: Any, values: Values) -> ir.Value:
    rows_type, _, lanes = signature.args
    row = _row(context, builder, rows_type, values, lanes.vector)
    builder.store(values[2], row, align=rows_type.dtype.bitwidth // 8)
    return context.get_dummy_value()


for _rows, _lanes in ((FLOAT_ROWS, OF_FLOATS), (TOKEN_ROWS, OF_TOKENS)):
    _compiles(load, _rows, types.int64, to=_lanes)(_load)
    _compiles(store, _rows, types.int64, _lanes, to=types.void)(_store)


@_compiles(every, types.float32, to=OF_FLOATS)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    first = ir.Constant(ir.IntType(32), 0)
    lanes = builder.insert_element(ir.Constant(FLOAT_VECTOR, ir.Undefined), values[0], first)
    return builder.shuffle_vector(lanes, lanes, _places([0] * LANES))


@_compiles(both_ways, FLOAT_ROWS, types.int64, to=OF_FLOATS)
def _(context: Any, builder: Builder, signature: Any, values: Values) -> ir.Value:
    row = ir.VectorType(ir.FloatType(), LANES // 4)
    one = builder.load(_row(context, builder, signature.args[0], values, row), align=4)
    zero = ir.Constant(row, [0.0] * (LANES // 4))
    two = builder.shuffle_vector(one, builder.fsub(zero, one), _places(range(LANES // 2)))
    zeros_too = ir.Constant(two.type, [0.0] * (LANES // 2))
    return builder.shuffle_vector(two, zeros_too, _places(range(LANES)))


@_compiles(operator.add, OF_FLOATS, OF_FLOATS, to=OF_FLOATS)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    return builder.fadd(*values)


@_compiles(operator.mul, OF_FLOATS, OF_FLOATS, to=OF_FLOATS)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    return builder.fmul(*values)


@_compiles(positive, OF_FLOATS, to=OF_FLOATS)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", values[0], _zero(FLOAT_VECTOR)), values[0], _zero(FLOAT_VECTOR))


@_compiles(whole, OF_FLOATS, to=OF_TOKENS)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    integers = builder.fptosi(values[0], ir.VectorType(ir.IntType(32), LANES))
    return builder.trunc(integers, TOKEN_VECTOR)


@_compiles(zeros, to=OF_TOKENS)
def _(_: Any, __: Builder, ___: Any, ____: Values) -> ir.Value:
    return _zero(TOKEN_VECTOR)


@_compiles(operator.add, OF_TOKENS, OF_TOKENS, to=OF_TOKENS)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    return builder.add(*values)


@_compiles(operator.sub, OF_TOKENS, OF_TOKENS, to=OF_TOKENS)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    return builder.sub(*values)


@_compiles(least, OF_TOKENS, OF_TOKENS, to=OF_TOKENS)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    return builder.select(builder.icmp_signed("<", *values), *values)


@_compiles(positive, OF_TOKENS, to=OF_TOKENS)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    return builder.select(builder.icmp_signed(">", values[0], _zero(TOKEN_VECTOR)), values[0], _zero(TOKEN_VECTOR))


@_compiles(below, OF_TOKENS, OF_TOKENS, to=types.int64)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    bits = builder.bitcast(builder.icmp_signed("<", *values), ir.IntType(LANES))
    return builder.zext(bits, ir.IntType(64))


@_compiles(kept, OF_TOKENS, types.int64, to=OF_TOKENS)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    bits = builder.bitcast(builder.trunc(values[1], ir.IntType(LANES)), BITS)
    return builder.select(bits, values[0], _zero(TOKEN_VECTOR))


@_compiles(squared, OF_TOKENS, to=types.int64)
def _(_: Any, builder: Builder, __: Any, values: Values) -> ir.Value:
    wide = builder.sext(values[0], ir.VectorType(ir.IntType(32), LANES))
    squares = builder.mul(wide, wide)
    nothing = ir.Constant(squares.type, ir.Undefined)
    # neighbours in 32 bits, which processors do as they multiply (pmaddwd), then in 64
    pairs = builder.add(*(builder.shuffle_vector(squares, nothing, _places(range(i, LANES, 2))) for i in (0, 1)))
    sums = builder.sext(pairs, ir.VectorType(ir.IntType(64), LANES // 2))
    half = LANES // 2
    while half > 1:
        half //= 2
        nothing = ir.Constant(sums.type, ir.Undefined)
        sums = builder.add(*(builder.shuffle_vector(sums, nothing, _places(range(i, i + half))) for i in (0, half)))
    return builder.extract_element(sums, ir.Constant(ir.IntType(32), 0))
