"""Immediate counters: how a receiver learns that everything has come, without being told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType

import numpy as np
from numpy.typing import NDArray

Imm = NewType("Imm", int)
"""The 32-bit immediate: slot in the low 20 bits, generation in the high 12."""

SLOT_BITS = 20
_SLOT_MASK = (1 << SLOT_BITS) - 1
GENERATION_BITS = 12


def make_imm(slot: int, generation: int) -> Imm:
    """Packs a slot and its generation (taken modulo 2**12) into an immediate."""
    if not 0 <= slot < 1 << SLOT_BITS:
        raise ValueError(f"slot {slot} does not fit {SLOT_BITS} bits")
    return Imm((generation % (1 << GENERATION_BITS)) << SLOT_BITS | slot)


def split_imm(imm: int) -> tuple[int, int]:
    """(slot, generation) of an immediate."""
    return imm & ((1 << SLOT_BITS) - 1), imm >> SLOT_BITS


OnFull = Callable[[Imm], None]
Fired = tuple[OnFull, Imm]

FEW = 8
"""Up to so many immediates a plain loop beats numpy's sort."""


def times_each(values: NDArray[np.int64]) -> list[tuple[int, int]]:
    """The distinct ones of a batch that is not empty, and how often each is there."""
    if (values == values[0]).all():  # by far the most frequent case, and a tenth of the time
        return [(int(values[0]), len(values))]
    distinct, counts = np.unique(values, return_counts=True)
    return list(zip(distinct.tolist(), counts.tolist(), strict=True))


class Watched:
    """What a compiled loop looks at to see whether an immediate fills a counter, `(2**20,) int64` each, by slot.

    `armed` is the immediate plus one (0: none); `left` is what it lacks. The loop takes from `left` what it sees, and
    who counts sets it right: between the two it is a hint. Pages that are not touched take no memory.
    """

    def __init__(self) -> None:
        self.armed = np.zeros(1 << SLOT_BITS, np.int64)
        self.left = np.zeros(1 << SLOT_BITS, np.int64)
        self._armed, self._left = self.armed.data, self.left.data  # the same: Python writes single numbers faster

    def set(self, imm: int, left: int) -> None:
        slot = imm & _SLOT_MASK
        self._left[slot] = left
        self._armed[slot] = imm + 1

    def clear(self, slot: int) -> None:
        self._armed[slot] = 0


@dataclass(slots=True)
class _Counter:
    imm: Imm
    expected: int
    on_full: OnFull
    received: int = 0
    fired: bool = False

    @property
    def full(self) -> bool:
        return self.received >= self.expected


class ImmediateCounters:
    """One counter per armed slot. Thread-safe; implements `transport.api.Immediates`.

    `on_waiting` is called when a counter begins to wait, so that whoever drains the queues polls faster.
    """

    def __init__(self, on_waiting: Callable[[], None] | None = None) -> None:
        self.watched = Watched()
        self._lock = threading.Lock()
        self._slots: dict[int, _Counter] = {}
        self._on_waiting = on_waiting
        self._waiting = 0
        self._late = 0
        self._overflow = 0

    @property
    def late(self) -> int:
        return self._late

    @property
    def overflow(self) -> int:
        return self._overflow

    @property
    def waiting(self) -> int:
        """Armed counters that are not full yet."""
        return self._waiting

    def arm(self, imm: Imm, expected: int, on_full: OnFull) -> None:
        """Raises ValueError if the slot is armed already or `expected` is negative."""
        if expected < 0:
            raise ValueError(f"expected count {expected} is negative")
        slot, _ = split_imm(imm)
        with self._lock:
            held = self._slots.get(slot)
            if held is not None:
                raise ValueError(f"slot {slot} is already armed, with generation {split_imm(held.imm)[1]}")
            counter = _Counter(imm, expected, on_full, fired=expected == 0)
            self._slots[slot] = counter
            self.watched.set(imm, expected)
            self._waiting += not counter.fired
        self._announce(counter)

    def retarget(self, imm: Imm, expected: int, on_full: OnFull) -> None:
        """Raises KeyError if `imm` is not armed, ValueError if `expected` is negative."""
        if expected < 0:
            raise ValueError(f"expected count {expected} is negative")
        with self._lock:
            counter = self._armed(imm)
            self._waiting -= not counter.fired
            counter.expected, counter.on_full = expected, on_full
            self.watched.set(imm, expected - counter.received)
            counter.fired = counter.full
            self._waiting += not counter.fired
        self._announce(counter)

    def received(self, imm: Imm) -> int:
        counter = self._slots.get(imm & _SLOT_MASK)
        return counter.received if counter is not None and counter.imm == imm else self._armed(imm).received

    def disarm(self, imm: Imm) -> int:
        """Raises KeyError if `imm` is not armed."""
        with self._lock:
            counter = self._armed(imm)
            del self._slots[split_imm(imm)[0]]
            self.watched.clear(split_imm(imm)[0])
            self._waiting -= not counter.fired
            return counter.received

    def count(self, values: NDArray[np.int64] | list[int]) -> list[Fired]:
        """Counts the immediates of one drained batch; the caller calls what is returned, outside of any lock."""
        fired: list[Fired] = []
        with self._lock:
            if len(values) <= FEW:
                for value in values:
                    self._count_one(int(value), 1, fired)
                return fired
            for value, times in times_each(np.asarray(values)):
                self._count_one(value, times, fired)
        return fired

    def _count_one(self, value: int, times: int, fired: list[Fired]) -> None:
        counter = self._slots.get(value & _SLOT_MASK)
        if counter is None or counter.imm != value:
            self._late += times
            return
        counter.received += times
        left = counter.expected - counter.received
        self.watched.set(value, left)
        if left > 0:
            return
        self._overflow += min(times, -left)
        if not counter.fired:
            counter.fired = True
            self._waiting -= 1
            fired.append((counter.on_full, counter.imm))

    def _armed(self, imm: Imm) -> _Counter:
        counter = self._slots.get(imm & _SLOT_MASK)
        if counter is None or counter.imm != imm:
            slot, generation = split_imm(imm)
            raise KeyError(f"slot {slot} is not armed with generation {generation}")
        return counter

    def _announce(self, counter: _Counter) -> None:
        if counter.fired:
            counter.on_full(counter.imm)
        elif self._on_waiting is not None:
            self._on_waiting()
