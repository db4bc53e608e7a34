"""A transfer plan carried out on arrays, by the very numbers that the transport would get.

For tests and for people who want to see where a byte goes; the nodes post `LayerWrites` instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.plan import LayerWrites, RankWrites, TransferPlan


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's region of one layer group, and the pages of it that the plan's pages are, in prompt order.

    `content` is `(bytes,) uint8`; `hits`, if given, is `(bytes,) int64` and counts what lands on each byte.
    """

    content: NDArray[np.uint8]
    layer_stride_bytes: int
    pages: NDArray[np.int64]
    hits: NDArray[np.int64] | None = None


Memories = Mapping[tuple[int, int], RankMemory]
"""By (layer group, rank)."""


def carry_out(plan: TransferPlan, sources: Memories, targets: Memories) -> Counter[int]:
    """Copies what the plan moves into `targets`; returns the writes that landed at each destination rank."""
    landed: Counter[int] = Counter()
    for entry in plan.entries:
        source, target = sources[entry.group, entry.source], targets[entry.group, entry.destination]
        for layer in range(entry.layers):
            landed[entry.destination] += _write_layer(entry, layer, source, target)
    return landed


def _write_layer(entry: RankWrites, layer: int, source: RankMemory, target: RankMemory) -> int:
    numbers = entry.layer_writes(layer, source.layer_stride_bytes, target.layer_stride_bytes)
    source_index, target_index = entry.source_segments.index(source.pages), entry.target_segments.index(target.pages)
    assert len(source_index) == len(target_index) == entry.pages * entry.segments_per_block
    read = _byte_numbers(numbers.source_offset, numbers.source_stride, source_index, numbers)
    written = _byte_numbers(numbers.target_offset, numbers.target_stride, target_index, numbers)
    target.content[written] = source.content[read]
    if target.hits is not None:
        np.add.at(target.hits, written, 1)
    return len(target_index)


def _byte_numbers(offset: int, stride: int, index: NDArray[np.int64], numbers: LayerWrites) -> NDArray[np.int64]:
    return offset + stride * index[:, None] + np.arange(numbers.block_bytes, dtype=np.int64)
