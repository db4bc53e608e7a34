"""Projections between a head's own space and the latent that all heads share (MLA), head by head.

`weight` is `(heads, nope + value_dim, rank)`: of each head first the rows that made its keys, then those of its values.
"""

from __future__ import annotations

import numpy as np

from pdserve.ops.api import Floats, Weights
from pdserve.ops.compile import inline, kernel
from pdserve.ops.linear import ROWS, dot_rows
from pdserve.ops.paged_attention import tile_rows
from pdserve.ops.spans import deinterleave
from pdserve.ops.tiles import weighted_sum_tile


@inline
def weigh_rows(rows, like, p, p_stride, terms, stride, out, out_stride, count):  # type: ignore[no-untyped-def]
    """16 columns of `out[i] = sum over t < count of p[i, t] * terms[t]` for six, three or fewer rows."""
    if rows == 6:
        weighted_sum_tile(6, 2, False, like, p, p_stride, terms, stride, out, out_stride, 0, count)
    elif rows == 3:
        weighted_sum_tile(3, 2, False, like, p, p_stride, terms, stride, out, out_stride, 0, count)
    else:
        for i in range(rows):
            p_at, out_at = p + i * p_stride, out + i * out_stride
            weighted_sum_tile(1, 2, False, like, p_at, p_stride, terms, stride, out_at, out_stride, 0, count)


@inline
def interleave(block, order):  # type: ignore[no-untyped-def]
    """Undoes the order in which sums over bf16 come: 16 elements, first the even ones, then the odd ones."""
    for i in range(16):
        order[i] = block[i]
    for i in range(8):
        block[2 * i] = order[i]
        block[2 * i + 1] = order[8 + i]


@kernel
def absorb(queries: Floats, weight: Weights, nope: int, out: Floats) -> None:
    """See `Ops.absorb`: queries `(rows, heads, nope + rope)`, out `(rows, heads, rank + rope)`."""
    rows, heads, dim = queries.shape
    rank, size, like = weight.shape[2], weight.itemsize, weight[0, 0, 0]
    p_stride, out_stride, order = heads * dim * 4, heads * out.shape[2] * 4, np.empty(16, np.float32)
    for head in range(heads):
        p, to = queries.ctypes.data + head * dim * 4, out.ctypes.data + head * out.shape[2] * 4
        terms = weight.ctypes.data + head * weight.shape[1] * rank * size
        for column in range(0, rank, 16):
            row = 0
            while row < rows:
                height = tile_rows(rows - row)
                at = to + row * out_stride + column * 4
                weigh_rows(height, like, p + row * p_stride, p_stride, terms + column * size, rank * size, at,
                           out_stride, nope)  # fmt: skip
                row += height
            if size == 2:
                for row in range(rows):
                    interleave(out[row, head, column : column + 16], order)
        for row in range(rows):
            for i in range(dim - nope):
                out[row, head, rank + i] = queries[row, head, nope + i]


@kernel
def expand(latents: Floats, weight: Weights, nope: int, out: Floats, packed: Floats) -> None:
    """See `Ops.expand`: latents `(rows, heads, rank)`, out `(rows, heads, value_dim)`; packed `(3, >= rank)`."""
    rows, heads, rank = latents.shape
    columns, size, like = out.shape[2], weight.itemsize, weight[0, 0, 0]
    x_stride, out_stride, w_stride = heads * rank * 4, heads * columns * 4, rank * size
    for head in range(heads):
        w = weight.ctypes.data + (head * weight.shape[1] + nope) * w_stride
        for row in range(0, rows, ROWS):
            height = min(ROWS, rows - row)
            a, a_stride = latents.ctypes.data + row * x_stride + head * rank * 4, x_stride
            if size == 2:
                for i in range(height):
                    deinterleave(a + i * x_stride, packed.ctypes.data + i * packed.shape[1] * 4, rank // 16,
                                 np.float32(1))  # fmt: skip
                a, a_stride = packed.ctypes.data, packed.shape[1] * 4
            to = out.ctypes.data + row * out_stride + head * columns * 4
            dot_rows(height, like, a, a_stride, w, w_stride, columns, to, out_stride, rank // 16, False)
