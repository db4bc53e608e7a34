"""What a writer asks for: one write per block, or one range. Plain data, checked when it is submitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from transport.descriptors import Memory, RegionDescriptor
from transport.imm import Imm


class SourceRegion(Protocol):
    """Local memory that writes may read from. Opaque; made by `Transport.register`."""

    @property
    def memory(self) -> Memory: ...


@dataclass(frozen=True, slots=True)
class PagedWrite:
    """One write per block, from source_offset + source_stride·source_index[i] to the same expression of the target.

    Offsets and strides in bytes, relative to the start of `source` and `target`; index arrays `(blocks,) int64` of
    equal length. Every block is exactly one write with one immediate; writes are never merged.
    """

    source: SourceRegion
    target: RegionDescriptor
    block_bytes: int
    source_offset: int
    source_stride: int
    source_index: NDArray[np.int64]
    target_offset: int
    target_stride: int
    target_index: NDArray[np.int64]
    imm: Imm


@dataclass(frozen=True, slots=True)
class SingleWrite:
    """One contiguous range, as one write with one immediate. Offsets in bytes.

    With `parts` above 1 it is cut into so many writes of about equal length, each with the immediate, which are spread
    over the link's NICs like the blocks of a paged write; the receiver counts `parts` immediates.
    """

    source: SourceRegion
    target: RegionDescriptor
    length_bytes: int
    source_offset: int
    target_offset: int
    imm: Imm
    parts: int = 1
