"""The rest of a layer, row by row: norms, rotation, cache append, activation, embedding."""

from __future__ import annotations

import numpy as np

from pdserve.ops.api import Floats, Indices, Weights
from pdserve.ops.compile import inline, kernel
from pdserve.ops.spans import narrowed, silu_mul_span, widened
from pdserve.ops.tiles import dot_tile


@inline
def norm_row(row, weight, epsilon, out):  # type: ignore[no-untyped-def]
    size = len(row)
    total = np.zeros(1, np.float32)
    at = row.ctypes.data
    dot_tile(1, 1, np.float32(0), at, 0, at, 0, total.ctypes.data, 0, size // 16, False)
    for i in range(size // 16 * 16, size):
        total[0] += row[i] * row[i]
    factor = np.float32(1.0) / np.sqrt(total[0] / np.float32(size) + np.float32(epsilon))
    for i in range(size):
        out[i] = row[i] * factor * weight[i]


@kernel
def rms_norm(x: Floats, weight: Floats, epsilon: float, out: Floats) -> None:
    for row in range(x.shape[0]):
        norm_row(x[row], weight, epsilon, out[row])


@kernel
def add_rms_norm(residual: Floats, delta: Floats, weight: Floats, epsilon: float, out: Floats) -> None:
    for row in range(residual.shape[0]):
        for i in range(residual.shape[1]):
            residual[row, i] += delta[row, i]
        norm_row(residual[row], weight, epsilon, out[row])


@kernel
def rotate(x: Floats, cos: Floats, sin: Floats, interleaved: bool, position: Indices) -> None:
    """The last `2 * half` elements of each head: element i with i + half, or 2i with 2i + 1 where interleaved."""
    rows, heads, dim = x.shape
    half = cos.shape[1]
    start = dim - 2 * half
    for row in range(rows):
        for head in range(heads):
            if interleaved:
                for i in range(half):
                    c, s = cos[position[row], i], sin[position[row], i]
                    first, second = x[row, head, start + 2 * i], x[row, head, start + 2 * i + 1]
                    x[row, head, start + 2 * i] = first * c - second * s
                    x[row, head, start + 2 * i + 1] = second * c + first * s
            else:
                for i in range(start, start + half):
                    c, s = cos[position[row], i - start], sin[position[row], i - start]
                    first, second = x[row, head, i], x[row, head, half + i]
                    x[row, head, i] = first * c - second * s
                    x[row, head, half + i] = second * c + first * s


@kernel
def append(source: Floats, block: Weights, which: int, page: Indices, slot: Indices) -> None:
    """source `(rows, kv_heads, head_dim)` into keys (which 0) or values (1) of block."""
    like = block[0, 0, 0, 0, 0]
    for row in range(source.shape[0]):
        for head in range(source.shape[1]):
            for i in range(source.shape[2]):
                block[page[row], which, head, slot[row], i] = narrowed(source[row, head, i], like)


@kernel
def silu_mul(gate: Floats, up: Floats) -> None:
    silu_mul_span(gate.ctypes.data, up.ctypes.data, gate.size)


@kernel
def embed(table: Weights, tokens: Indices, out: Floats) -> None:
    for row in range(out.shape[0]):
        for i in range(out.shape[1]):
            out[row, i] = widened(table[tokens[row], i])
