"""Page geometry: where a page block lies in a rank's region, and how many bytes it has.

Pure arithmetic, shared by prefill, decode, transport tests and the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class KvLayout(StrEnum):
    """Order inside a page block."""

    HND = "hnd"  # [2, heads, tokens, dim]
    NHD = "nhd"  # [2, tokens, heads, dim]


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """One rank's region of one layer group.

    A page block is `page_size` tokens of one layer; the region is `[layers, pages, block]`, so that
    `offset(layer, page) = layer * layer_stride_bytes + page * block_bytes`.
    """

    layers: int
    kv_heads: int  # on this rank
    head_dim: int
    page_size: int  # tokens
    element_bytes: int
    pages: int
    layout: KvLayout = KvLayout.HND

    @property
    def block_bytes(self) -> int:
        return 2 * self.kv_heads * self.page_size * self.head_dim * self.element_bytes

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
