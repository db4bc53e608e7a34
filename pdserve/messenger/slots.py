"""Immediate slots of a decode node: which are free, and the generation each was last armed with."""

from __future__ import annotations

from collections import deque

from transport.api import GENERATION_BITS, Imm, make_imm, split_imm

SLOTS = 4096


class SlotTable:
    """Slots `first` and following; they go round in order, so that a generation returns as late as possible.

    Not thread-safe: one owner.
    """

    def __init__(self, slots: int = SLOTS, *, first: int = 0) -> None:
        self._free = deque(range(first, first + slots))
        self._generation = dict.fromkeys(self._free, 0)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> Imm:
        """A slot with its next generation. Raises IndexError when all are taken."""
        slot = self._free.popleft()
        self._generation[slot] = (self._generation[slot] + 1) % (1 << GENERATION_BITS)
        return make_imm(slot, self._generation[slot])

    def give_back(self, imm: Imm) -> None:
        """Only after no write with this immediate can be in flight any more."""
        slot, generation = split_imm(imm)
        assert self._generation[slot] == generation and slot not in self._free
        self._free.append(slot)
