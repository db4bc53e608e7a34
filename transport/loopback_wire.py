"""What is under way on the in-process transport: in which order it arrives, when, and what never does."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from transport.outgoing import Path
from transport.transfer import Part

if TYPE_CHECKING:
    from transport.loopback_link import LoopbackLink

_MOST_BYTES = 4 << 20
"""A flight lands as a whole, under the landing lock of its link: whoever closes that waits for no more than this."""
_CUTS = 16
"""A shuffled window is so many flights at least (or one for each block)."""


Blocks = slice | NDArray[np.int64] | None


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """Blocks of one part that land together, or one fragment of a message."""

    link: LoopbackLink
    path: Path
    part: Part | None = None
    blocks: Blocks = None
    count: int = 0
    fragment: bytes = b""


class Wire:
    """Flights by the time that they are due. Used by the sender's worker alone.

    See `LoopbackTransport` for the arguments.
    """

    def __init__(self, seed: int | None, delay_s: tuple[float, float], drop: float) -> None:
        self._shuffled, self._delay_s, self._drop = seed is not None, delay_s, drop
        self._random = random.Random(seed)
        self._blocks_random = np.random.default_rng(seed)
        self._sequence = itertools.count()
        self._heap: list[tuple[float, float, int, Flight]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def due_s(self) -> float | None:
        """Seconds until the next flight lands."""
        return max(0.0, self._heap[0][0] - time.monotonic()) if self._heap else None

    def carry(self, link: LoopbackLink, path: Path, part: Part, count: int) -> None:
        """The next `count` blocks of `part`. With a seed, blocks change places within the batch and flights within
        the wire."""
        start, stop = part.at, part.at + count
        most = max(1, _MOST_BYTES // max(1, part.block_bytes))
        if self._shuffled:
            most = min(most, max(1, link.window // _CUTS))
            order = self._blocks_random.permutation(count) + start
            cuts = [order[at : at + most] for at in range(0, count, most)]
            flights = [Flight(link, path, part, cut, len(cut)) for cut in cuts]
        else:
            ends = [(at, min(stop, at + most)) for at in range(start, stop, most)]
            flights = [Flight(link, path, part, slice(at, end), end - at) for at, end in ends]
        for flight in flights:
            self._push(flight)

    def carry_fragment(self, link: LoopbackLink, path: Path, fragment: bytes) -> None:
        self._push(Flight(link, path, fragment=fragment))

    def next(self, now: float) -> Flight | None:
        """What is due."""
        return heapq.heappop(self._heap)[3] if self._heap and self._heap[0][0] <= now else None

    def kept(self, flight: Flight) -> Blocks:
        """The blocks that are not dropped."""
        if not self._drop:
            return flight.blocks
        blocks = flight.blocks
        every = np.arange(blocks.start, blocks.stop) if isinstance(blocks, slice) else blocks
        assert every is not None
        return every[self._blocks_random.random(len(every)) >= self._drop]

    def take_out(self, which: Callable[[Flight], bool]) -> list[Flight]:
        """Removes and returns the flights that are cut off in mid-air."""
        gone = [entry[3] for entry in self._heap if which(entry[3])]
        if gone:
            self._heap = [entry for entry in self._heap if not which(entry[3])]
            heapq.heapify(self._heap)
        return gone

    def coin(self) -> bool:
        """Whether a flight that was cut off had landed before; never without a seed."""
        return self._shuffled and self._random.random() < 0.5

    def _push(self, flight: Flight) -> None:
        due = time.monotonic() + self._random.uniform(*self._delay_s) if self._delay_s[1] else 0.0
        rank = self._random.random() if self._shuffled else 0.0
        heapq.heappush(self._heap, (due, rank, next(self._sequence), flight))
