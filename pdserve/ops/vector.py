"""Eight float32 lanes in LLVM IR: loads, widening of bf16, reductions in a fixed order, exp.

What is emitted here is the determinism contract in small: additions happen in the order written, whatever the shape of
the call; nothing is marked fast-math, so LLVM keeps that order.

bf16 comes in blocks of 16, read as eight 32-bit words: the even elements are the low halves shifted up, the odd ones
the high halves masked. So one block is two vectors *in deinterleaved order*, and whatever it is multiplied with must be
deinterleaved alike (`deinterleave`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

LANES = 8
BLOCK = 16  # elements of one bf16 load

F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)
VECTOR = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)

Builder = Any
Value = Any


def constant(value: float, kind: Any = VECTOR) -> Value:
    """`value` in every lane (or as a scalar)."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)
    return ir.Constant(kind, value)


def indices(order: list[int]) -> Value:
    return ir.Constant(ir.VectorType(I32, len(order)), order)


def load(builder: Builder, address: Value, kind: Any = VECTOR, align: int = 4) -> Value:
    """A value of `kind` from an address given as a 64-bit integer."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: Builder, value: Value, address: Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def offset(builder: Builder, address: Value, count: Value | int, size_bytes: int = 1) -> Value:
    if isinstance(count, int):
        return builder.add(address, ir.Constant(I64, count * size_bytes)) if count else address
    return builder.add(address, builder.mul(count, ir.Constant(I64, size_bytes)))


def call(builder: Builder, name: str, *arguments: Value) -> Value:
    """An LLVM intrinsic over the type of its first argument."""
    kind = arguments[0].type
    suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    signature = ir.FunctionType(kind, [kind] * len(arguments))
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, f"{name}.{suffix}"), arguments)


def prefetch(builder: Builder, address: Value) -> None:
    """Asks for the cache line at an address that may lie outside of mapped memory; harmless there."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    signature = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    read, keep, data = (ir.Constant(I32, value) for value in (0, 3, 1))
    builder.call(function, [pointer, read, keep, data])


def fma(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    return call(builder, "llvm.fma", a, b, c)


def splat(builder: Builder, scalar: Value) -> Value:
    nothing = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    one = builder.insert_element(nothing, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, nothing, indices([0] * LANES))


def load_half(builder: Builder, address: Value, half: int, bf16: bool) -> Value:
    """Half of the 16 elements at `address`: float32 the first or last 8, bf16 the even or odd ones."""
    if not bf16:
        return load(builder, offset(builder, address, half, 4 * LANES))
    words = load(builder, address, INTS, align=2)
    return low_half(builder, words) if half == 0 else high_half(builder, words)


def low_half(builder: Builder, words: Value) -> Value:
    """The bf16 in the low halves of eight words."""
    return builder.bitcast(builder.shl(words, constant(16, INTS)), VECTOR)


def high_half(builder: Builder, words: Value) -> Value:
    """The bf16 in the high halves of eight words."""
    return builder.bitcast(builder.and_(words, constant(0xFFFF0000, INTS)), VECTOR)


def _half_sums(builder: Builder, vector: Value) -> Value:
    """Lanes 0..3 plus lanes 4..7: `<4 x float>`."""
    low = builder.shuffle_vector(vector, vector, indices([0, 1, 2, 3]))
    return builder.fadd(low, builder.shuffle_vector(vector, vector, indices([4, 5, 6, 7])))


def lane_sum(builder: Builder, vector: Value) -> Value:
    """With s = lanes[:4] + lanes[4:]: (s0 + s2) + (s1 + s3)."""
    s = _half_sums(builder, vector)
    pair = builder.fadd(s, builder.shuffle_vector(s, s, indices([2, 3, 2, 3])))
    first, second = (builder.extract_element(pair, ir.Constant(I32, lane)) for lane in (0, 1))
    return builder.fadd(first, second)


def lane_maximum(builder: Builder, vector: Value) -> Value:
    for order in ([4, 5, 6, 7, 4, 5, 6, 7], [2, 3, 2, 3, 2, 3, 2, 3], [1] * LANES):
        vector = call(builder, "llvm.maxnum", vector, builder.shuffle_vector(vector, vector, indices(order)))
    return builder.extract_element(vector, ir.Constant(I32, 0))


def exp(builder: Builder, x: Value) -> Value:
    """e**x within 2 ulp for x in [-87.3, 88.3]; 0 below, the largest value above; exactly 1 at 0.

    Vector or scalar, with the same bits. Source: the Cephes library's expf (range reduction and polynomial).
    """
    kind = x.type

    def number(value: float) -> Value:
        return constant(value, kind)

    clamped = call(builder, "llvm.minnum", x, number(88.3762626647950))
    clamped = call(builder, "llvm.maxnum", clamped, number(-87.3365478515625))
    power = call(builder, "llvm.floor", fma(builder, clamped, number(1.44269504088896341), number(0.5)))
    rest = fma(builder, power, number(-0.693359375), clamped)
    rest = fma(builder, power, number(2.12194440e-4), rest)
    sum_ = number(1.9875691500e-4)
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        sum_ = fma(builder, sum_, rest, number(term))
    sum_ = builder.fadd(fma(builder, sum_, builder.fmul(rest, rest), rest), number(1.0))
    ints = ir.VectorType(I32, LANES) if isinstance(kind, ir.VectorType) else I32
    exponent = builder.add(builder.fptosi(power, ints), constant(127, ints))
    scaled = builder.fmul(sum_, builder.bitcast(builder.shl(exponent, constant(23, ints)), kind))
    return builder.select(builder.fcmp_ordered("<", x, number(-87.3365478515625)), number(0.0), scaled)


def transposed(builder: Builder, rows: list[Value]) -> list[Value]:
    """Eight vectors of eight lanes as eight vectors of the columns; lanes of any 32-bit type."""

    def mixed(x: Value, y: Value, order: list[int]) -> Value:
        return builder.shuffle_vector(x, y, indices(order))

    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]  # within halves, as the CPU's unpack has it
    pairs = [mixed(rows[i], rows[i + 1], order) for i in (0, 2, 4, 6) for order in (low, high)]
    first, second = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    quads = [mixed(pairs[i + j], pairs[i + j + 2], order) for i in (0, 4) for j in (0, 1) for order in (first, second)]
    halves = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    return [mixed(quads[i], quads[i + 4], order) for order in halves for i in range(4)]


def is_bf16(like: Any) -> bool:
    return bool(like == types.uint16)


def loop(
    builder: Builder, count: Value, carried: list[Value], body: Callable[[Value, list[Value]], list[Value]]
) -> Any:
    """`for index in range(count): carried = body(index, carried)`; returns what is carried at the end."""
    start, head, end = builder.block, builder.append_basic_block("head"), builder.append_basic_block("end")
    body_block = builder.append_basic_block("body")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    phis = [builder.phi(value.type) for value in carried]
    index.add_incoming(ir.Constant(I64, 0), start)
    for phi, value in zip(phis, carried, strict=True):
        phi.add_incoming(value, start)
    builder.cbranch(builder.icmp_signed("<", index, count), body_block, end)
    builder.position_at_end(body_block)
    results = body(index, phis)
    index.add_incoming(builder.add(index, ir.Constant(I64, 1)), builder.block)
    for phi, value in zip(phis, results, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(end)
    return phis


def rows_at(builder: Builder, address: Value, stride: Value, count: int) -> list[Value]:
    found = [address]
    for _ in range(count - 1):
        found.append(builder.add(found[-1], stride))
    return found
