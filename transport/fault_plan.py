"""Which faults the fault layer plays, and the dice that it throws."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What happens to writes and messages that go out. Nothing does by default.

    Benign faults: whatever is promised of a transport still holds.

    - `delay_s`: each piece of a write is handed on after between the first and the second number of seconds.
    - `reorder`: the blocks of a write are shuffled before it is cut into pieces, and pieces overtake each other.
    - `bytes_per_s`: a slow NIC. Pieces of all links leave one after the other, no faster than this.
    - `storm_every_s`, `storm_s`: in each period of the first length, nothing is accepted during the last `storm_s`, as
      if the provider answered EAGAIN all the time.

    Hostile faults:

    - `fail_share`: the share of pieces that cannot be posted. Such a piece ends its transfer with a FabricError before
      it was posted, and breaks the link, as the last path of a link does.
    - `lose_share`, `repeat_share`, `message_delay_s`: messages are lost, sent twice, or sent later: a control channel
      that keeps none of the promises of `Link.send`.

    `piece_blocks` is the most blocks of one piece, of which each is a write of the transport below. Everything that is
    drawn comes from `seed`, in the order of the calls.
    """

    seed: int = 0
    delay_s: tuple[float, float] = (0.0, 0.0)
    reorder: bool = False
    bytes_per_s: float = 0.0
    storm_every_s: float = 0.0
    storm_s: float = 0.0
    fail_share: float = 0.0
    lose_share: float = 0.0
    repeat_share: float = 0.0
    message_delay_s: tuple[float, float] = (0.0, 0.0)
    piece_blocks: int = 256

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for name in ("fail_share", "lose_share", "repeat_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be from 0 to 1, not {getattr(self, name)}")
        for name in ("delay_s", "message_delay_s"):
            least, most = getattr(self, name)
            if not 0.0 <= least <= most:
                raise ValueError(f"{name} must be two rising numbers of seconds, not {least} and {most}")
        if self.storm_s < 0 or (self.storm_s and self.storm_s >= self.storm_every_s):
            raise ValueError(f"storms of {self.storm_s} s every {self.storm_every_s} s leave no time between them")
        if self.piece_blocks < 1 or self.bytes_per_s < 0:
            raise ValueError("piece_blocks must be at least 1, and bytes_per_s not negative")


@dataclass(frozen=True, slots=True)
class MessageFate:
    """When each copy of a message is sent, in seconds from now; none if it is lost."""

    copies_s: tuple[float, ...]


class Dice:
    """Draws for one transport. Thread-safe."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._random = random.Random(plan.seed)
        self._blocks = np.random.default_rng(plan.seed)
        self.began = time.monotonic()
        self._free_at = 0.0

    def pieces(self, blocks: int) -> list[NDArray[np.int64] | slice]:
        """Which blocks each piece takes; at least one piece, though it may be empty."""
        most = self._plan.piece_blocks
        if not self._plan.reorder:
            return [slice(at, at + most) for at in range(0, blocks, most)] or [slice(0, 0)]
        with self._lock:
            order = self._blocks.permutation(blocks)
        return [order[at : at + most] for at in range(0, blocks, most)] or [slice(0, 0)]

    def due(self, length_bytes: int) -> float:
        """When the next piece is handed on (`time.monotonic`): a moment later for each draw, but for a reordering."""
        with self._lock:
            now = time.monotonic()
            if self._plan.bytes_per_s:
                self._free_at = now = max(now, self._free_at) + length_bytes / self._plan.bytes_per_s
            return self._after_storm(now + self._random.uniform(*self._plan.delay_s))

    def fails(self) -> bool:
        """Whether the next piece cannot be posted."""
        if not self._plan.fail_share:
            return False
        with self._lock:
            return self._random.random() < self._plan.fail_share

    def message(self) -> MessageFate:
        plan = self._plan
        with self._lock:
            if self._random.random() < plan.lose_share:
                return MessageFate(())
            copies = 2 if self._random.random() < plan.repeat_share else 1
            return MessageFate(tuple(self._random.uniform(*plan.message_delay_s) for _ in range(copies)))

    def _after_storm(self, due: float) -> float:
        if not self._plan.storm_s:
            return due
        into = (due - self.began) % self._plan.storm_every_s
        return due + max(0.0, self._plan.storm_every_s - into) if self._in_storm(into) else due

    def _in_storm(self, into: float) -> bool:
        return into >= self._plan.storm_every_s - self._plan.storm_s
