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


def _is_bf16(array: Any) -> bool:
    return bool(array.dtype == types.uint16)


def _loop(builder: Builder, count: Value, carried: list[Value], body: Callable[[Value, list[Value]], list[Value]]) -> Any:
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


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
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


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def weighted_rows_tile(context, rows, blocks, like, p, p_stride, values, v_stride, out, out_stride, scale, tokens):  # type: ignore[no-untyped-def]
    """`out[i] = out[i] * scale[i] + sum over t of p[i, t] * values[t]`, `16 * blocks` elements wide, rows <= 3.

    `blocks` is 1 or 2, `like` tells what `values` is; for bf16, out is in deinterleaved order. The sum over t is
    sequential.
    """
    row_count, block_count, bf16 = rows.literal_value, blocks.literal_value, _is_bf16(like)
    signature = types.void(rows, blocks, like, *[types.int64] * 8)

    def generate(_context: Any, builder: Builder, _signature: Any, arguments: Any) -> Value:
        p, p_stride, values, v_stride, out, out_stride, scale, tokens = arguments[3:]
        p_rows, out_rows = _rows(builder, p, p_stride, row_count), _rows(builder, out, out_stride, row_count)
        block_bytes = v.BLOCK * (2 if bf16 else 4)
        width = 2 * block_count

        def step(index: Value, sums: list[Value]) -> list[Value]:
            row = builder.add(values, builder.mul(index, v_stride))
            vectors: list[Value] = []
            for block in range(block_count):
                at = v.offset(builder, row, block, block_bytes)
                vectors.extend(v.load_half(builder, at, half, bf16) for half in range(2))
            sums = list(sums)
            for i in range(row_count):
                weight = v.splat(builder, v.load(builder, v.offset(builder, p_rows[i], index, 4), v.F32))
                for j in range(width):
                    sums[i * width + j] = v.fma(builder, weight, vectors[j], sums[i * width + j])
            return sums

        held: list[Value] = []
        for i in range(row_count):
            factor = v.splat(builder, v.load(builder, v.offset(builder, scale, i, 4), v.F32))
            for j in range(width):
                kept = v.load(builder, v.offset(builder, out_rows[i], j, 4 * v.LANES))
                held.append(builder.fmul(kept, factor))
        sums = _loop(builder, tokens, held, step)
        for i in range(row_count):
            for j in range(width):
                v.store(builder, sums[i * width + j], v.offset(builder, out_rows[i], j, 4 * v.LANES))
        return _context.get_dummy_value()

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def softmax_step(context, scores, vectors, maximum):  # type: ignore[no-untyped-def]
    """One page of an online softmax over `8 * vectors` scores, in place.

    Returns (new maximum, exp(old maximum - new maximum), sum of exp(score - new maximum)). Masked scores are -inf.
    """
    signature = types.UniTuple(types.float32, 3)(types.int64, types.int64, types.float32)

    def generate(_context: Any, builder: Builder, _signature: Any, arguments: Any) -> Value:
        scores, vectors, maximum = arguments

        def at(index: Value) -> Value:
            return v.offset(builder, scores, index, 4 * v.LANES)

        def larger(index: Value, carried: list[Value]) -> list[Value]:
            return [v.call(builder, "llvm.maxnum", carried[0], v.load(builder, at(index)))]

        highest = _loop(builder, vectors, [v.splat(builder, maximum)], larger)[0]
        top = builder.extract_element(highest, ir.Constant(v.I32, 0))
        for lane in range(1, v.LANES):
            top = v.call(builder, "llvm.maxnum", top, builder.extract_element(highest, ir.Constant(v.I32, lane)))
        tops = v.splat(builder, top)

        def weigh(index: Value, carried: list[Value]) -> list[Value]:
            weight = v.exp(builder, builder.fsub(v.load(builder, at(index)), tops))
            v.store(builder, weight, at(index))
            return [builder.fadd(carried[0], weight)]

        weights = _loop(builder, vectors, [v.constant(0.0)], weigh)[0]
        results = top, v.exp(builder, builder.fsub(maximum, top)), v.lane_sum(builder, weights)
        return _context.make_tuple(builder, _signature.return_type, results)

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
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


@intrinsic  # type: ignore[untyped-decorator]
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


@intrinsic  # type: ignore[untyped-decorator]
def scale_span(context, source, target, blocks, factor):  # type: ignore[no-untyped-def]
    """`target = source * factor`, in order, over `16 * blocks` float32: what `deinterleave` is for bf16."""
    signature = types.void(types.int64, types.int64, types.int64, types.float32)

    def generate(_context: Any, builder: Builder, _signature: Any, arguments: Any) -> Value:
        source, target, blocks, factor = arguments
        factors = v.splat(builder, factor)

        def step(index: Value, _carried: list[Value]) -> list[Value]:
            for half in range(2):
                shift = v.offset(builder, builder.mul(index, ir.Constant(v.I64, 4 * v.BLOCK)), half, 4 * v.LANES)
                x = v.load(builder, builder.add(source, shift))
                v.store(builder, builder.fmul(x, factors), builder.add(target, shift))
            return []

        _loop(builder, blocks, [], step)
        return _context.get_dummy_value()

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(context, value):  # type: ignore[no-untyped-def]
    """The 32 bits of a float32."""
    return types.uint32(types.float32), lambda _context, builder, _signature, values: builder.bitcast(values[0], v.I32)


@intrinsic  # type: ignore[untyped-decorator]
def from_bits(context, bits):  # type: ignore[no-untyped-def]
    """The float32 of 32 bits."""
    return types.float32(types.uint32), lambda _context, builder, _signature, values: builder.bitcast(values[0], v.F32)
