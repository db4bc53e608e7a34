"""`x · weightᵀ` in tiles of three rows by three outputs; an output is summed in one order, whatever the call."""

from __future__ import annotations

import numpy as np

from pdserve.ops.api import Floats, Weights
from pdserve.ops.compile import inline, kernel
from pdserve.ops.spans import deinterleave, widened
from pdserve.ops.tiles import dot_tile

ROWS = 3
COLUMNS = 3
_WEIGHT_BLOCK_BYTES = 262_144  # of weights that stay in the second-level cache while all rows pass over them


@inline
def dot_rows(rows, like, a, a_stride, w, w_stride, columns, out, out_stride, blocks, add):  # type: ignore[no-untyped-def]
    """`dot_tile` for one to three rows over any number of columns; addresses and strides in bytes."""
    whole = columns // 3 * 3
    for column in range(0, whole, 3):
        w_at, out_at = w + column * w_stride, out + column * 4
        if rows == 3:
            dot_tile(3, 3, like, a, a_stride, w_at, w_stride, out_at, out_stride, blocks, add)
        elif rows == 2:
            dot_tile(2, 3, like, a, a_stride, w_at, w_stride, out_at, out_stride, blocks, add)
        else:
            dot_tile(1, 3, like, a, a_stride, w_at, w_stride, out_at, out_stride, blocks, add)
    for column in range(whole, columns):
        w_at, out_at = w + column * w_stride, out + column * 4
        if rows == 3:
            dot_tile(3, 1, like, a, a_stride, w_at, w_stride, out_at, out_stride, blocks, add)
        elif rows == 2:
            dot_tile(2, 1, like, a, a_stride, w_at, w_stride, out_at, out_stride, blocks, add)
        else:
            dot_tile(1, 1, like, a, a_stride, w_at, w_stride, out_at, out_stride, blocks, add)


@kernel
def linear(x: Floats, weight: Weights, out: Floats, packed: Floats) -> None:
    """x `(rows, inputs)`, weight `(outputs, inputs)`, out `(rows, outputs)`; packed `(3, >= inputs)` is scratch."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    blocks = inputs // 16
    size, like = weight.itemsize, weight[0, 0]
    x_stride, w_stride, out_stride = inputs * 4, inputs * size, outputs * 4
    values, weights, results, scratch = x.ctypes.data, weight.ctypes.data, out.ctypes.data, packed.ctypes.data
    span = max(COLUMNS, _WEIGHT_BLOCK_BYTES // w_stride // COLUMNS * COLUMNS)
    for first in range(0, outputs, span):
        columns = min(span, outputs - first)
        w = weights + first * w_stride
        for row in range(0, rows, ROWS):
            height = min(ROWS, rows - row)
            a = values + row * x_stride
            a_stride = x_stride
            if size == 2:
                a_stride = packed.shape[1] * 4
                for i in range(height):
                    deinterleave(a + i * x_stride, scratch + i * a_stride, blocks, np.float32(1))
                a = scratch
            to = results + row * out_stride + first * 4
            dot_rows(height, like, a, a_stride, w, w_stride, columns, to, out_stride, blocks, False)
    if inputs % 16:
        add_remainder(x, weight, out, blocks * 16)


@inline
def add_remainder(x, weight, out, start):  # type: ignore[no-untyped-def]
    """Adds the products of the inputs behind the last whole block, one after another."""
    for row in range(x.shape[0]):
        for column in range(weight.shape[0]):
            total = out[row, column]
            for i in range(start, x.shape[1]):
                total += x[row, i] * widened(weight[column, i])
            out[row, column] = total
