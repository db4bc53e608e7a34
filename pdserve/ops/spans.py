"""What runs along one row or over single elements, as numba intrinsics; addresses are raw, strides in bytes."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdserve.ops import vector as v

Builder = Any
Value = Any


@intrinsic
def softmax_step(context, scores, vectors, allowed, state, state_stride):  # type: ignore[no-untyped-def]
    """One page of an online softmax: `8 * vectors` scores become weights in place, those from `allowed` on become 0.

    state points at the row's maximum; at one and two strides behind it lie the total of the weights and the factor by
    which earlier sums shrink, all float32. Needs one finite score by now.
    """
    signature = types.void(*[types.int64] * 5)

    def generate(_context: Any, builder: Builder, _signature: Any, arguments: Any) -> Value:
        scores, vectors, allowed, state, state_stride = arguments
        places = v.rows_at(builder, state, state_stride, 3)
        maximum, total = (v.load(builder, place, v.F32) for place in places[:2])
        first_lanes = ir.Constant(v.INTS, list(range(v.LANES)))
        limit = v.splat(builder, builder.trunc(allowed, v.I32))

        def at(index: Value) -> Value:
            return v.offset(builder, scores, index, 4 * v.LANES)

        def seen(index: Value, value: Value, other: float) -> Value:
            base = v.splat(builder, builder.trunc(builder.mul(index, ir.Constant(v.I64, v.LANES)), v.I32))
            mask = builder.icmp_signed("<", builder.add(base, first_lanes), limit)
            return builder.select(mask, value, v.constant(other))

        def larger(index: Value, carried: list[Value]) -> list[Value]:
            score = seen(index, v.load(builder, at(index)), float("-inf"))
            return [v.call(builder, "llvm.maxnum", carried[0], score)]

        highest = v.loop(builder, vectors, [v.splat(builder, maximum)], larger)[0]
        top = v.lane_maximum(builder, highest)
        tops = v.splat(builder, top)

        def weigh(index: Value, carried: list[Value]) -> list[Value]:
            weight = seen(index, v.exp(builder, builder.fsub(v.load(builder, at(index)), tops)), 0.0)
            v.store(builder, weight, at(index))
            return [builder.fadd(carried[0], weight)]

        weights = v.loop(builder, vectors, [v.constant(0.0)], weigh)[0]
        factor = v.exp(builder, builder.fsub(maximum, top))
        grown = builder.fadd(builder.fmul(total, factor), v.lane_sum(builder, weights))
        for value, place in zip((top, grown, factor), places, strict=True):
            v.store(builder, value, place)
        return _context.get_dummy_value()

    return signature, generate


@intrinsic
def prefetch_span(context, address, lines):  # type: ignore[no-untyped-def]
    """Asks for `lines` cache lines of 64 bytes ahead of their use."""

    def generate(_context: Any, builder: Builder, _signature: Any, arguments: Any) -> Value:
        address, lines = arguments

        def step(index: Value, _carried: list[Value]) -> list[Value]:
            v.prefetch(builder, v.offset(builder, address, index, 64))
            return []

        v.loop(builder, lines, [], step)
        return _context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def deinterleave(context, source, target, blocks, factor):  # type: ignore[no-untyped-def]
    """`target = source * factor`, every 16 elements reordered to the even ones, then the odd ones."""
    signature = types.void(types.int64, types.int64, types.int64, types.float32)

    def generate(_context: Any, builder: Builder, _signature: Any, arguments: Any) -> Value:
        source, target, blocks, factor = arguments
        factors = v.splat(builder, factor)

        def step(index: Value, _carried: list[Value]) -> list[Value]:
            at = v.offset(builder, source, index, 4 * v.BLOCK)
            first, second = (v.load_half(builder, at, half, False) for half in range(2))
            for half in range(2):
                picked = builder.shuffle_vector(first, second, v.indices(list(range(half, v.BLOCK, 2))))
                to = v.offset(builder, v.offset(builder, target, index, 4 * v.BLOCK), half, 4 * v.LANES)
                v.store(builder, builder.fmul(picked, factors), to)
            return []

        v.loop(builder, blocks, [], step)
        return _context.get_dummy_value()

    return signature, generate


@intrinsic
def silu_mul_span(context, gate, up, count):  # type: ignore[no-untyped-def]
    """`gate = gate / (1 + exp(-gate)) * up` over `count` float32."""
    signature = types.void(types.int64, types.int64, types.int64)

    def generate(_context: Any, builder: Builder, _signature: Any, arguments: Any) -> Value:
        gate, up, count = arguments

        whole = builder.sdiv(count, ir.Constant(v.I64, v.LANES))

        def apply(kind: Any, shift: Value) -> None:
            x = v.load(builder, builder.add(gate, shift), kind)
            negated = builder.fsub(v.constant(-0.0, kind), x)
            scaled = builder.fdiv(x, builder.fadd(v.constant(1.0, kind), v.exp(builder, negated)))
            product = builder.fmul(scaled, v.load(builder, builder.add(up, shift), kind))
            v.store(builder, product, builder.add(gate, shift))

        def by_vector(index: Value, _carried: list[Value]) -> list[Value]:
            apply(v.VECTOR, builder.mul(index, ir.Constant(v.I64, 4 * v.LANES)))
            return []

        def by_element(index: Value, _carried: list[Value]) -> list[Value]:
            apply(v.F32, builder.mul(builder.add(index, done), ir.Constant(v.I64, 4)))
            return []

        v.loop(builder, whole, [], by_vector)
        done = builder.mul(whole, ir.Constant(v.I64, v.LANES))
        v.loop(builder, builder.sub(count, done), [], by_element)
        return _context.get_dummy_value()

    return signature, generate


@intrinsic
def narrowed(context, value, like):  # type: ignore[no-untyped-def]
    """A float32 as an element of `like`: for bf16 rounded to nearest even; a NaN stays one."""
    if not v.is_bf16(like):
        return types.float32(types.float32, like), lambda _context, _builder, _signature, values: values[0]

    def generate(_context: Any, builder: Builder, _signature: Any, values: Any) -> Value:
        def word(number: int) -> Value:
            return ir.Constant(v.I32, number)

        bits = builder.bitcast(values[0], v.I32)
        high = builder.lshr(bits, word(16))
        up = builder.add(builder.add(bits, word(0x7FFF)), builder.and_(high, word(1)))
        is_nan = builder.fcmp_unordered("uno", values[0], values[0])
        kept = builder.select(is_nan, builder.or_(high, word(0x40)), builder.lshr(up, word(16)))
        return builder.trunc(kept, ir.IntType(16))

    return types.uint16(types.float32, like), generate


@intrinsic
def widened(context, value):  # type: ignore[no-untyped-def]
    """A stored element as float32: bf16 (uint16) shifted up, float32 as it is."""

    def generate(_context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        if signature.args[0] == types.float32:
            return values[0]
        return builder.bitcast(builder.shl(builder.zext(values[0], v.I32), ir.Constant(v.I32, 16)), v.F32)

    return types.float32(types.float32 if value == types.float32 else types.uint16), generate
