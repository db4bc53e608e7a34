"""The micro-kernels, as numba intrinsics over raw addresses. Shapes of a tile are literals; strides are in bytes."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdserve.ops import vector as v

Builder = Any
Value = Any

PREFETCH_BYTES = 8192  # ahead in the weights; measured: streaming gains half, cached passes lose nothing


@intrinsic(prefer_literal=True)
def dot_tile(context, rows, columns, like, a, a_stride, w, w_stride, out, out_stride, blocks, add):  # type: ignore[no-untyped-def]
    """`out[i, j] (+)= a[i] · w[j]` over `16 * blocks` elements, for i < rows <= 3 and j < columns <= 3.

    `like` tells by its dtype what w is; for bf16, a must be deinterleaved. `add` keeps what out holds.
    """
    row_count, column_count, bf16 = rows.literal_value, columns.literal_value, v.is_bf16(like)
    signature = types.void(rows, columns, like, *[types.int64] * 7, types.boolean)

    def generate(_context: Any, builder: Builder, _signature: Any, arguments: Any) -> Value:
        a, a_stride, w, w_stride, out, out_stride, blocks, add = arguments[3:]
        a_rows, w_rows = v.rows_at(builder, a, a_stride, row_count), v.rows_at(builder, w, w_stride, column_count)
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
        sums = v.loop(builder, blocks, zeros, step)
        for i, row in enumerate(v.rows_at(builder, out, out_stride, row_count)):
            for j in range(column_count):
                total = v.lane_sum(builder, sums[i * column_count + j])
                at = v.offset(builder, row, j, 4)
                held = builder.select(add, v.load(builder, at, v.F32), v.constant(0.0, v.F32))
                v.store(builder, builder.fadd(held, total), at)
        return _context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def weighted_sum_tile(context, rows, vectors, keep, like, p, p_stride, terms, stride, out, out_stride, scale, count):  # type: ignore[no-untyped-def]
    """`out[i] = out[i] * scale[i] + sum over t < count of p[i, t] * terms[t]`, `8 * vectors` wide, for i < rows <= 6.

    `keep` False starts at zero, without reading out or scale. `like` tells what terms is; bf16 comes in whole blocks of
    16 (vectors even) and leaves out in deinterleaved order. The sum over t is sequential.
    """
    row_count, width, bf16 = rows.literal_value, vectors.literal_value, v.is_bf16(like)
    signature = types.void(rows, vectors, keep, like, *[types.int64] * 8)

    def generate(_context: Any, builder: Builder, _signature: Any, arguments: Any) -> Value:
        p, p_stride, terms, stride, out, out_stride, scale, count = arguments[4:]
        p_rows, out_rows = v.rows_at(builder, p, p_stride, row_count), v.rows_at(builder, out, out_stride, row_count)

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

        sums = v.loop(builder, count, [value for i in range(row_count) for value in kept(i)], step)
        for i in range(row_count):
            for j in range(width):
                v.store(builder, sums[i * width + j], v.offset(builder, out_rows[i], j, 4 * v.LANES))
        return _context.get_dummy_value()

    return signature, generate


@intrinsic
def transpose_tile(context, like, source, source_stride, target, target_stride, blocks):  # type: ignore[no-untyped-def]
    """Eight rows of `16 * blocks` stored elements as columns of float32: `target[k][r] = source[r][k]` for r < 8."""
    bf16 = v.is_bf16(like)
    signature = types.void(like, *[types.int64] * 5)

    def generate(_context: Any, builder: Builder, _signature: Any, arguments: Any) -> Value:
        source, source_stride, target, target_stride, blocks = arguments[1:]
        rows = v.rows_at(builder, source, source_stride, v.LANES)

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

        v.loop(builder, blocks, [], step)
        return _context.get_dummy_value()

    return signature, generate
