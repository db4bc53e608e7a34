"""The micro-kernels, as numba intrinsics over raw addresses. Shapes of a tile are literals; strides are in bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdserve.ops import vector as v

Builder = Any
Value = Any

PREFETCH_BYTES = 8192  # ahead in the weights; measured: streaming gains half, cached passes lose nothing


def _is_bf16(like: Any) -> bool:
    return bool(like == types.uint16)


def _loop(
    builder: Builder, count: Value, carried: list[Value], body: Callable[[Value, list[Value]], list[Value]]
) -> Any:
    """`for index in range(count): carried = body(index, carried)`; returns what is carried at the end."""
    start, head, end = builder.block, builder.append_basic_block("head"), builder.append_basic_block("end")
    body_block = builder.append_basic_block("body")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(v.I64)
    phis = [builder.phi(value.type) for value in carried]
    index.add_incoming(ir.Constant(v.I64, 0), start)
    for phi, value in zip(phis, carried, strict=True):
        phi.add_incoming(value, start)
    builder.cbranch(builder.icmp_signed("<", index, count), body_block, end)
    builder.position_at_end(body_block)
    results = body(index, phis)
    index.add_incoming(builder.add(index, ir.Constant(v.I64, 1)), builder.block)
    for phi, value in zip(phis, results, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(end)
    return phis


def _rows(builder: Builder, address: Value, stride: Value, count: int) -> list[Value]:
    found = [address]
    for _ in range(count - 1):
        found.append(builder.add(found[-1], stride))
    return found


@intrinsic(prefer_literal=True)
def dot_tile(context, rows, columns, like, a, a_stride, w, w_stride, out, out_stride, blocks, add):  # type: ignore[no-untyped-def]
    """`out[i, j] (+)= a[i] · w[j]` over `16 * blocks` elements, for i < rows <= 3 and j < columns <= 3.

    `like` tells by its dtype what w is; for bf16, a must be deinterleaved. `add` keeps what out holds.
    """
    row_count, column_count, bf16 = rows.literal_value, columns.literal_value, _is_bf16(like)
    signature = types.void(rows, columns, like, *[types.int64] * 7, types.boolean)

    def generate(_context: Any, builder: Builder, _signature: Any, arguments: Any) -> Value:
        a, a_stride, w, w_stride, out, out_stride, blocks, add = arguments[3:]
        a_rows, w_rows = _rows(builder, a, a_stride, row_count), _rows(builder, w, w_stride, column_count)
        block_bytes = v.BLOCK * (2 if bf16 else 4)

        def step(index: Value, sums: list[Value]) -> list[Value]:
            a_offset = builder.mul(index, ir.Constant(v.I64, 4 * v.BLOCK))
            w_offset = builder.mul(index, ir.Constant(v.I64, block_bytes))
            sums = list(sums)
            for half in range(2):  # outermost, so that 3 x 3 sums, 3 of a and 1 of w fit 16 registers
                of_a = [v.load_half(builder, builder.add(row, a_offset), half, False) for row in a_rows]
                for j, row in enumerate(w_rows):
                    if half == 0:
                        v.prefetch(builder, v.offset(builder, builder.add(row, w_offset), PREFETCH_BYTES))
                    of_w = v.load_half(builder, builder.add(row, w_offset), half, bf16)
                    for i in range(row_count):
                        k = i * column_count + j
                        sums[k] = v.fma(builder, of_a[i], of_w, sums[k])
            return sums

        zeros = [v.constant(0.0)] * (row_count * column_count)
        sums = _loop(builder, blocks, zeros, step)
        for i, row in enumerate(_rows(builder, out, out_stride, row_count)):
            for j in range(column_count):
                total = v.lane_sum(builder, sums[i * column_count + j])
                at = v.offset(builder, row, j, 4)
                held = builder.select(add, v.load(builder, at, v.F32), v.constant(0.0, v.F32))
                v.store(builder, builder.fadd(held, total), at)
        return _context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def weighted_sum_tile(context, rows, vectors, keep, like, p, p_stride, terms, stride, out, out_stride, scale, count):  # type: ignore[no-untyped-def]
    """`out[i] = out[i] * scale[i] + sum over t < count of p[i, t] * terms[t]`, `8 * vectors` wide, for i < rows <= 3.

    `keep` False starts at zero, without reading out or scale. `like` tells what terms is; bf16 comes in whole blocks of
    16 (vectors even) and leaves out in deinterleaved order. The sum over t is sequential.
    """
    row_count, width, bf16 = rows.literal_value, vectors.literal_value, _is_bf16(like)
    signature = types.void(rows, vectors, keep, like, *[types.int64] * 8)

    def generate(_context: Any, builder: Builder, _signature: Any, arguments: Any) -> Value:
        p, p_stride, terms, stride, out, out_stride, scale, count = arguments[4:]
        p_rows, out_rows = _rows(builder, p, p_stride, row_count), _rows(builder, out, out_stride, row_count)

        def term(row: Value, j: int) -> Value:
            at = v.offset(builder, row, j // 2, v.BLOCK * (2 if bf16 else 4))
            return v.load_half(builder, at, j % 2, bf16)

        def step(index: Value, sums: list[Value]) -> list[Value]:
            row = builder.add(terms, builder.mul(index, stride))
            of_row = [term(row, j) for j in range(width)]
            sums = list(sums)
            for i in range(row_count):
                weight = v.splat(builder, v.load(builder, v.offset(builder, p_rows[i], index, 4), v.F32))
                for j in range(width):
                    sums[i * width + j] = v.fma(builder, weight, of_row[j], sums[i * width + j])
            return sums

        def kept(i: int) -> list[Value]:
            if not keep.literal_value:
                return [v.constant(0.0)] * width
            factor = v.splat(builder, v.load(builder, v.offset(builder, scale, i, 4), v.F32))
            places = [v.offset(builder, out_rows[i], j, 4 * v.LANES) for j in range(width)]
            return [builder.fmul(v.load(builder, place), factor) for place in places]

        sums = _loop(builder, count, [value for i in range(row_count) for value in kept(i)], step)
        for i in range(row_count):
            for j in range(width):
                v.store(builder, sums[i * width + j], v.offset(builder, out_rows[i], j, 4 * v.LANES))
        return _context.get_dummy_value()

    return signature, generate


@intrinsic
def transpose_tile(context, like, source, source_stride, target, target_stride, blocks):  # type: ignore[no-untyped-def]
    """Eight rows of `16 * blocks` stored elements as columns of float32: `target[k][r] = source[r][k]` for r < 8."""
    bf16 = _is_bf16(like)
    signature = types.void(like, *[types.int64] * 5)

    def generate(_context: Any, builder: Builder, _signature: Any, arguments: Any) -> Value:
        source, source_stride, target, target_stride, blocks = arguments[1:]
        rows = _rows(builder, source, source_stride, v.LANES)

        def put(values: list[Value], place: Value, step: int) -> None:
            for value in values:
                v.store(builder, value, place)
                place = builder.add(place, builder.mul(target_stride, ir.Constant(v.I64, step)))

        def step(index: Value, _carried: list[Value]) -> list[Value]:
            place = builder.add(target, builder.mul(builder.mul(index, ir.Constant(v.I64, v.BLOCK)), target_stride))
            at = [v.offset(builder, row, index, v.BLOCK * (2 if bf16 else 4)) for row in rows]
            if bf16:
                words = v.transposed(builder, [v.load(builder, row, v.INTS, align=2) for row in at])
                put([v.low_half(builder, word) for word in words], place, 2)
                put([v.high_half(builder, word) for word in words], builder.add(place, target_stride), 2)
            else:
                for half in range(2):
                    columns = v.transposed(builder, [v.load_half(builder, row, half, False) for row in at])
                    put(columns, builder.add(place, builder.mul(target_stride, ir.Constant(v.I64, 8 * half))), 1)
            return []

        _loop(builder, blocks, [], step)
        return _context.get_dummy_value()

    return signature, generate


@intrinsic
def softmax_step(context, scores, vectors, allowed, state, state_stride):  # type: ignore[no-untyped-def]
    """One page of an online softmax: `8 * vectors` scores become weights in place, those from `allowed` on become 0.

    state points at the row's maximum; at one and two strides behind it lie the total of the weights and the factor by
    which earlier sums shrink, all float32. Needs one finite score by now.
    """
    signature = types.void(*[types.int64] * 5)

    def generate(_context: Any, builder: Builder, _signature: Any, arguments: Any) -> Value:
        scores, vectors, allowed, state, state_stride = arguments
        places = _rows(builder, state, state_stride, 3)
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

        highest = _loop(builder, vectors, [v.splat(builder, maximum)], larger)[0]
        top = v.lane_maximum(builder, highest)
        tops = v.splat(builder, top)

        def weigh(index: Value, carried: list[Value]) -> list[Value]:
            weight = seen(index, v.exp(builder, builder.fsub(v.load(builder, at(index)), tops)), 0.0)
            v.store(builder, weight, at(index))
            return [builder.fadd(carried[0], weight)]

        weights = _loop(builder, vectors, [v.constant(0.0)], weigh)[0]
        factor = v.exp(builder, builder.fsub(maximum, top))
        grown = builder.fadd(builder.fmul(total, factor), v.lane_sum(builder, weights))
        for value, place in zip((top, grown, factor), places, strict=True):
            v.store(builder, value, place)
        return _context.get_dummy_value()

    return signature, generate


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

        _loop(builder, blocks, [], step)
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

        _loop(builder, whole, [], by_vector)
        done = builder.mul(whole, ir.Constant(v.I64, v.LANES))
        _loop(builder, builder.sub(count, done), [], by_element)
        return _context.get_dummy_value()

    return signature, generate


@intrinsic
def narrowed(context, value, like):  # type: ignore[no-untyped-def]
    """A float32 as an element of `like`: for bf16 rounded to nearest even; a NaN stays one."""
    if not _is_bf16(like):
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
