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

    def __init__(self, memory: KvMemory) -> None:
        super().__init__(memory.geometry.pages)
        self._memory = memory
        self.faults: list[str] = []
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
        if self._memory.fd >= 0:
            self._memory.blocks.view(np.uint32)[:, list(taken)] = POISON
        return taken

    def _examine(self, pages: Iterable[PageIndex], when: str) -> None:
        if self._memory.fd < 0:
            return
        blocks = self._memory.blocks.view(np.uint32)
        hit = [page for page in pages if (blocks[:, page] != POISON).any()]
        if hit:
            self.faults.append(f"pages {hit} were written to after they had been handed back, and one {when}")
