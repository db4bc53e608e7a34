"""Attention over pages, one kernel for decode rows and prefill chunks.

A tile is a few query rows times the heads that share a key/value head; it passes over the sequence's pages once, with
an online softmax. Every row's sums run in the order of pages and tokens, whatever shares its tile.
"""

from __future__ import annotations

import numpy as np

from pdserve.ops.api import Floats, Indices, Weights
from pdserve.ops.compile import inline, kernel
from pdserve.ops.linear import dot_rows
from pdserve.ops.tiles import deinterleave, scale_span, softmax_step, weighted_rows_tile

QUERY_ROWS = 32  # of one tile
LANES = 8


@inline
def weigh_values(rows, like, p, p_stride, values, dim, out, scale, tokens):  # type: ignore[no-untyped-def]
    """`weighted_rows_tile` for one to three rows over the whole head dimension; addresses and strides in bytes."""
    size = like.itemsize
    for block in range(0, dim // 16 - 1, 2):
        at, to = values + block * 16 * size, out + block * 64
        if rows == 3:
            weighted_rows_tile(3, 2, like, p, p_stride, at, dim * size, to, dim * 4, scale, tokens)
        elif rows == 2:
            weighted_rows_tile(2, 2, like, p, p_stride, at, dim * size, to, dim * 4, scale, tokens)
        else:
            weighted_rows_tile(1, 2, like, p, p_stride, at, dim * size, to, dim * 4, scale, tokens)
    if dim // 16 % 2:
        at, to = values + (dim - 16) * size, out + (dim - 16) * 4
        for row in range(rows):
            shift = row * dim * 4
            weighted_rows_tile(1, 1, like, p + row * p_stride, p_stride, at, 0 + dim * size, to + shift, dim * 4,
                               scale + row * 4, tokens)  # fmt: skip


@inline
def attend_page(block, page, head, filled, rows, group, position, scores, queries, sums, state):  # type: ignore[no-untyped-def]
    """Takes the first `filled` tokens of a page into the online softmax of a tile's rows.

    `position` is that of the tile's first row relative to the page; state is `(3, rows)`: maximum, total, factor.
    """
    dim, size = block.shape[4], block.itemsize
    keys = block.ctypes.data + ((page * 2 * block.shape[2]) + head) * block.shape[3] * dim * size
    values = keys + block.shape[2] * block.shape[3] * dim * size
    width = scores.shape[1]
    vectors = (filled + LANES - 1) // LANES
    for row in range(0, rows, 3):
        height = min(3, rows - row)
        at = scores.ctypes.data + row * width * 4
        a = queries.ctypes.data + row * dim * 4
        dot_rows(height, block, a, dim * 4, keys, dim * size, filled, at, width * 4, dim // 16, False)
        for i in range(row, row + height):
            for token in range(max(0, position + i // group + 1), vectors * LANES):
                scores[i, token] = -np.inf
            top, factor, total = softmax_step(scores.ctypes.data + i * width * 4, vectors, state[0, i])
            state[0, i] = top
            state[1, i] = state[1, i] * factor + total
            state[2, i] = factor
        to = sums.ctypes.data + row * dim * 4
        scale = state.ctypes.data + (2 * state.shape[1] + row) * 4
        weigh_values(height, block, at, width * 4, values, dim, to, scale, filled)


@inline
def prepare_tile(queries, first_row, count, head, group, packed, sums, state, bf16):  # type: ignore[no-untyped-def]
    """Packs a tile's queries, scaled and in the keys' element order, and resets its sums."""
    dim = queries.shape[2]
    scale = np.float32(1.0) / np.sqrt(np.float32(dim))
    for i in range(count * group):
        source = queries[first_row + i // group, head * group + i % group].ctypes.data
        target = packed.ctypes.data + i * dim * 4
        if bf16:
            deinterleave(source, target, dim // 16, scale)
        else:
            scale_span(source, target, dim // 16, scale)
        state[0, i] = -np.inf
        state[1, i] = 0.0
        sums[i, :dim] = 0.0


@inline
def finish_tile(out, first_row, count, head, group, sums, state, bf16):  # type: ignore[no-untyped-def]
    """Divides by the softmax totals and writes the rows in their natural element order."""
    dim = out.shape[2]
    for i in range(count * group):
        row, query_head = first_row + i // group, head * group + i % group
        total = state[1, i]
        for d in range(dim):
            place = d // 16 * 16 + d % 2 * 8 + d % 16 // 2 if bf16 else d
            out[row, query_head, d] = sums[i, place] / total


@kernel
def paged_attention(
    queries: Floats,
    block: Weights,
    row_start: Indices,
    first_position: Indices,
    page_table: Indices,
    out: Floats,
    packed: Floats,
    scores: Floats,
    sums: Floats,
    state: Floats,
) -> None:
    """See `Ops.attention`. packed, sums `(tile rows, head_dim)`, scores `(tile rows, page)`, state `(3, tile rows)`.

    scores is padded to whole vectors of 8; tile rows are QUERY_ROWS times the heads of a group.
    """
    kv_heads, page_size = block.shape[2], block.shape[3]
    group = queries.shape[1] // kv_heads
    bf16 = block.itemsize == 2
    for sequence in range(len(first_position)):
        for head in range(kv_heads):
            for first_row in range(row_start[sequence], row_start[sequence + 1], QUERY_ROWS):
                count = min(QUERY_ROWS, row_start[sequence + 1] - first_row)
                position = first_position[sequence] + first_row - row_start[sequence]
                length = position + count
                prepare_tile(queries, first_row, count, head, group, packed, sums, state, bf16)
                for start in range(0, length, page_size):
                    page = page_table[sequence, start // page_size]
                    filled = min(page_size, length - start)
                    attend_page(block, page, head, filled, count * group, group, position - start,
                                scores, packed, sums, state)  # fmt: skip
                finish_tile(out, first_row, count, head, group, sums, state, bf16)
