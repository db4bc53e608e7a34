"""Attention over pages: one kernel for decode rows and prefill chunks, grouped heads in either order, and latents.

A latent (MLA) is one key head whose values are the first elements of its own keys, so it is a matter of addresses.
A tile is a few query rows times the heads that share a key/value head; it passes over the sequence's pages once, with
an online softmax. A page's keys are transposed into scratch memory, so that scores come out eight tokens at a time
without sums across lanes. Every row's sums run in the order of dimensions, tokens and pages, whatever shares its tile.
"""

from __future__ import annotations

import numpy as np

from pdserve.ops.api import Floats, Indices
from pdserve.ops.compile import inline, kernel
from pdserve.ops.spans import prefetch_span, softmax_step
from pdserve.ops.tiles import transpose_tile, weighted_sum_tile

QUERY_ROWS = 32  # of one tile at most
TILE_ROWS = 256  # query rows times heads, where a group has many heads
LANES = 8


@inline
def score_rows(rows, queries, dim, columns, scores, page_size):  # type: ignore[no-untyped-def]
    """Scores of up to six rows against a page's tokens; addresses of the first row."""
    like, across, row = np.float32(0), dim * 4, page_size * 4
    for at in range(0, row // 64 * 64, 64):
        if rows == 6:
            weighted_sum_tile(6, 2, False, like, queries, across, columns + at, row, scores + at, row, 0, dim)
        elif rows == 3:
            weighted_sum_tile(3, 2, False, like, queries, across, columns + at, row, scores + at, row, 0, dim)
        else:
            for i in range(rows):
                q, to = queries + i * across, scores + i * row + at
                weighted_sum_tile(1, 2, False, like, q, across, columns + at, row, to, row, 0, dim)
    if page_size == 8:
        for i in range(rows):
            q, to = queries + i * across, scores + i * row
            weighted_sum_tile(1, 1, False, like, q, across, columns, row, to, row, 0, dim)


@inline
def weigh_values(rows, like, size, weights, page_size, values, stride, sums, dim, factors, tokens):  # type: ignore[no-untyped-def]
    """Shrinks the sums of up to six rows and adds a page's weighted values; addresses of the first row."""
    row, out = page_size * 4, dim * 4
    for d in range(0, dim, 16):
        at, to = values + d * size, sums + d * 4
        if rows == 6:
            weighted_sum_tile(6, 2, True, like, weights, row, at, stride, to, out, factors, tokens)
        elif rows == 3:
            weighted_sum_tile(3, 2, True, like, weights, row, at, stride, to, out, factors, tokens)
        else:
            for i in range(rows):
                w, t, f = weights + i * row, to + i * out, factors + i * 4
                weighted_sum_tile(1, 2, True, like, w, row, at, stride, t, out, f, tokens)


@inline
def tile_rows(left):  # type: ignore[no-untyped-def]
    """How many of the rows that are left go into the next tile: six or three, and what remains."""
    return 6 if left >= 6 else (3 if left >= 3 else left)


@inline
def attend_page(like, size, keys, values, stride, page_size, dims, filled, position, count, group, scratch):  # type: ignore[no-untyped-def]
    """Takes the first `filled` tokens of a page into the online softmax of `count` query rows times `group` heads.

    `keys` and `values` are addresses of one head's, its tokens `stride` bytes apart; `dims` are a key's and a value's
    elements; `position` is that of the first query row relative to the page.
    """
    queries, columns, scores, sums, state, state_stride = scratch
    dim, value_dim = dims
    rows, page_row = count * group, page_size * 4
    for token in range(0, page_size, LANES):  # stale tokens come along; softmax_step gives them no weight
        transpose_tile(like, keys + token * stride, stride, columns + token * 4, page_row, dim // 16)
    row = 0
    while row < rows:
        height = tile_rows(rows - row)
        score_rows(height, queries + row * dim * 4, dim, columns, scores + row * page_row, page_size)
        row += height
    row = 0
    for query in range(count):
        allowed = min(max(0, position + query + 1), page_size)
        for _ in range(group):
            softmax_step(scores + row * page_row, page_size // LANES, allowed, state + row * 4, state_stride)
            row += 1
    row = 0
    while row < rows:
        height = tile_rows(rows - row)
        at, to = scores + row * page_row, sums + row * value_dim * 4
        factors = state + 2 * state_stride + row * 4
        weigh_values(height, like, size, at, page_size, values, stride, to, value_dim, factors, filled)
        row += height


@inline
def prepare_tile(queries, first_row, count, head, group, scale, packed, sums, state):  # type: ignore[no-untyped-def]
    """Packs a tile's queries, scaled, and resets its sums."""
    for i in range(count * group):
        for d in range(queries.shape[2]):
            packed[i, d] = queries[first_row + i // group, head * group + i % group, d] * scale
        for d in range(sums.shape[1]):
            sums[i, d] = 0.0
        state[0, i] = -np.inf
        state[1, i] = 0.0


@inline
def finish_tile(out, first_row, count, head, group, sums, state, bf16):  # type: ignore[no-untyped-def]
    """Divides by the softmax totals and writes the rows; sums over bf16 values are in deinterleaved order."""
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
    like: np.generic,
    pages: int,
    strides: tuple[int, int, int, int, int],
    kv_heads: int,
    scale: np.float32,
    row_start: Indices,
    first_position: Indices,
    page_table: Indices,
    out: Floats,
    packed: Floats,
    columns: Floats,
    scores: Floats,
    sums: Floats,
    state: Floats,
) -> None:
    """See `Ops.attention` and `Ops.latent_attention`. `like` is an element of the pages, which start at `pages`.

    `strides` are bytes: an element, a page, from keys to values, a head, a token. Scratch: packed `(tile rows,
    head_dim)`, sums `(tile rows, value_dim)`, columns `(head_dim, page_size)`, scores `(tile rows, page_size)`, state
    `(3, tile rows)`; tile rows are some query rows times the heads of a group.
    """
    size, page_bytes, value_offset, head_bytes, stride = strides
    page_size, dim, group = scores.shape[1], queries.shape[2], queries.shape[1] // kv_heads
    query_rows = packed.shape[0] // group
    scratch = (packed.ctypes.data, columns.ctypes.data, scores.ctypes.data, sums.ctypes.data, state.ctypes.data,
               state.shape[1] * 4)  # fmt: skip
    lines = page_size * stride // 64 if stride == dim * size else 0
    for sequence in range(len(first_position)):
        for head in range(kv_heads):
            first_head = pages + head * head_bytes
            for first_row in range(row_start[sequence], row_start[sequence + 1], query_rows):
                count = min(query_rows, row_start[sequence + 1] - first_row)
                position = first_position[sequence] + first_row - row_start[sequence]
                length = position + count
                prepare_tile(queries, first_row, count, head, group, scale, packed, sums, state)
                for start in range(0, length, page_size):
                    keys = first_head + page_table[sequence, start // page_size] * page_bytes
                    if start + page_size < length:  # the CPU's own prefetching ends at each page's border
                        following = first_head + page_table[sequence, start // page_size + 1] * page_bytes
                        prefetch_span(following, lines)
                        if value_offset:
                            prefetch_span(following + value_offset, lines)
                    attend_page(like, size, keys, keys + value_offset, stride, page_size, (dim, out.shape[2]),
                                min(page_size, length - start), position - start, count, group, scratch)  # fmt: skip
                finish_tile(out, first_row, count, head, group, sums, state, size == 2)
