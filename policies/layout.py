"""Page geometry: where a page block lies in a rank's region, how many bytes it has, and which of them a head range is.

Pure arithmetic, shared by prefill, decode, transport tests and the simulator. Byte ranges are affine (offset, length,
stride, count), never lists: a block of 128 segments takes no more room than one of a single segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class KvLayout(StrEnum):
    """Order inside a page block of keys and values; a latent cache has one order only."""

    HND = "hnd"  # [2, heads, tokens, dim]
    NHD = "nhd"  # [2, tokens, heads, dim]


@dataclass(frozen=True, slots=True)
class HeadRange:
    """KV heads `first` to `first + count - 1`, numbered in the model or within a rank, as the context says."""

    first: int
    count: int

    @property
    def stop(self) -> int:
        return self.first + self.count

    def overlap(self, other: HeadRange) -> HeadRange | None:
        first, stop = max(self.first, other.first), min(self.stop, other.stop)
        return HeadRange(first, stop - first) if first < stop else None


@dataclass(frozen=True, slots=True)
class Segments:
    """`count` byte ranges of one block: `length_bytes` each, at `offset_bytes + k * stride_bytes`, k < count.

    The strides tile the block: `count * stride_bytes` is the block's size. So segment k of page p lies at
    `offset_bytes + (p * count + k) * stride_bytes`, and a run of pages is one affine index (see `index`).
    """

    offset_bytes: int
    length_bytes: int
    stride_bytes: int
    count: int

    @property
    def block_bytes(self) -> int:
        return self.count * self.stride_bytes

    def index(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which multiples of the stride the segments of these pages are: `(len(pages) * count,)`, page by page."""
        if self.count == 1:
            return pages
        return (pages[:, None] * self.count + np.arange(self.count, dtype=np.int64)).reshape(-1)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """One page of one layer on one rank.

    `kv_heads` counts the rank's own; None means MLA: one latent vector per token, of `head_dim` elements (rope part
    included), without a K/V pair.
    """

    kv_heads: int | None
    head_dim: int
    page_size: int  # tokens
    element_bytes: int
    layout: KvLayout = KvLayout.HND

    @property
    def shape(self) -> tuple[int, ...]:
        """In elements."""
        if self.kv_heads is None:
            return (self.page_size, self.head_dim)
        if self.layout is KvLayout.HND:
            return (2, self.kv_heads, self.page_size, self.head_dim)
        return (2, self.page_size, self.kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        vectors = 1 if self.kv_heads is None else 2 * self.kv_heads
        return vectors * self.page_size * self.head_dim * self.element_bytes

    @property
    def whole(self) -> Segments:
        return Segments(0, self.block_bytes, self.block_bytes, 1)

    def segments(self, heads: HeadRange) -> Segments:
        """The rank's own heads `heads`, cut so that a rank with another number of heads cuts them alike.

        HND: one range for K and one for V; NHD: two for every token. Also for all heads of the rank, as the other side
        may hold more. A latent has no heads to cut.
        """
        assert self.kv_heads is not None and 0 <= heads.first < heads.stop <= self.kv_heads
        row = self.head_dim * self.element_bytes
        if self.layout is KvLayout.HND:
            row *= self.page_size
        count = 2 if self.layout is KvLayout.HND else 2 * self.page_size
        return Segments(heads.first * row, heads.count * row, self.kv_heads * row, count)


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """One rank's region of one layer group.

    A page block is `page_size` tokens of one layer; the region is `[layers, pages, block]`, so that
    `offset(layer, page) = layer * layer_stride_bytes + page * block_bytes`.
    """

    layers: int
    kv_heads: int | None  # on this rank; None: MLA, a latent of `head_dim` elements a token
    head_dim: int
    page_size: int  # tokens
    element_bytes: int
    pages: int
    layout: KvLayout = KvLayout.HND

    @property
    def block(self) -> BlockShape:
        return BlockShape(self.kv_heads, self.head_dim, self.page_size, self.element_bytes, self.layout)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """In elements: `[2, H, N, D]` (HND), `[2, N, H, D]` (NHD) or `[N, R + P]` (MLA)."""
        return self.block.shape

    @property
    def block_bytes(self) -> int:
        return self.block.block_bytes

    @property
    def layer_stride_bytes(self) -> int:
        return self.pages * self.block_bytes

    @property
    def page_bytes(self) -> int:
        """One page: the blocks of all layers."""
        return self.layers * self.block_bytes

    @property
    def region_bytes(self) -> int:
        return self.pages * self.page_bytes

    def offset(self, layer: int, page: int) -> int:
        return layer * self.layer_stride_bytes + page * self.block_bytes

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)
