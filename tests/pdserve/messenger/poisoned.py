"""A page pool that notices whatever is written to a page after it was handed back."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pdserve.kv.memory import KvMemory
from pdserve.kv.pool import PagePool
from pdserve.types import PageIndex

POISON = 0x7FC0DEAD
"""As a float32 a NaN, so that what was never written does not pass for an answer either."""


class PoisonedPool(PagePool):
    """Free pages hold poison, from before they can be allotted until they are. `faults` says where they did not."""

    def __init__(self, *memories: KvMemory) -> None:
        super().__init__(memories[0].geometry.pages)
        self._memories = memories
        self.faults: list[str] = []
        for memory in memories:
            memory.blocks.view(np.uint32).fill(POISON)

    def allocate(self, count: int, *, leave_free: int = 0) -> tuple[PageIndex, ...]:
        pages = super().allocate(count, leave_free=leave_free)
        self._examine(pages, "was allotted")
        return pages

    def free(self, pages: Iterable[PageIndex]) -> None:
        super().free(self._poisoned(pages))

    def release(self, pages: Iterable[PageIndex]) -> None:
        super().release(self._poisoned(pages))

    def examine(self) -> None:
        """All that are free now; while nobody allots any."""
        self._examine(list(self._free), "is free")

    def _poisoned(self, pages: Iterable[PageIndex]) -> tuple[PageIndex, ...]:
        taken = tuple(pages)
        for memory in self._memories:
            if memory.fd >= 0:
                memory.blocks.view(np.uint32)[:, list(taken)] = POISON
        return taken

    def _examine(self, pages: Iterable[PageIndex], when: str) -> None:
        open_ones = [memory.blocks.view(np.uint32) for memory in self._memories if memory.fd >= 0]
        hit = [page for page in pages if any((blocks[:, page] != POISON).any() for blocks in open_ones)]
        if hit:
            self.faults.append(f"pages {hit} were written to after they had been handed back, and one {when}")
