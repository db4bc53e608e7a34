"""A write that the fault layer has cut into pieces, each of them a write of the transport below."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from transport.api import OnDone, Transfer
from transport.errors import TransferCancelled
from transport.inbox import guarded
from transport.writes import SourceRegion

_numbers = itertools.count(1)


class FaultyTransfer:
    """Implements `transport.api.Transfer`: counts are sums over the pieces. Thread-safe.

    It is done when no piece is held back or under way below. Its first error stops the pieces that are held back.
    """

    def __init__(self, region: SourceRegion | None, total: int, pieces: int, peer: str) -> None:
        self.region, self.total, self.peer = region, total, peer
        self.number = next(_numbers)
        self.error: Exception | None = None
        self.finished_at: float | None = None
        self.on_done: OnDone | None = None
        self.on_finished: Callable[[FaultyTransfer], None] | None = None
        """Called before `done` shows."""
        self._lock = threading.Lock()
        self._held_back, self._below = pieces, 0
        self._live: set[Transfer] = set()
        self._ended_early: set[Transfer] = set()
        self._posted = self._completed = 0
        self._stopped = self._finished = False
        self._done = threading.Event()

    @property
    def posted(self) -> int:
        with self._lock:
            return self._posted + sum(piece.posted for piece in self._live)

    @property
    def completed(self) -> int:
        with self._lock:
            return self._completed + sum(piece.completed for piece in self._live)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._done.wait(timeout_s)

    def cancel(self) -> None:
        self.stop(TransferCancelled(f"{self} was cancelled after {self.posted} of {self.total} writes"))
        for piece in list(self._live):
            piece.cancel()

    def stop(self, error: Exception) -> None:
        """What is held back will not be handed on."""
        with self._lock:
            if not self._finished:
                self._stopped, self._held_back = True, 0
                self.error = self.error or error
        self._settle()

    def take(self) -> bool:
        """A piece is about to be handed on; False if it must not be."""
        with self._lock:
            if self._stopped:
                return False
            self._held_back -= 1
            self._below += 1
            return True

    def handed(self, piece: Transfer) -> None:
        with self._lock:
            if piece in self._ended_early:
                self._ended_early.remove(piece)
                return
            self._live.add(piece)
            stopped = self._stopped
        if stopped and isinstance(self.error, TransferCancelled):
            piece.cancel()

    def refused(self, error: Exception) -> None:
        """A piece that was taken could not be handed on."""
        with self._lock:
            self._below -= 1
        self.stop(error)

    def ended(self, piece: Transfer) -> None:
        """The `on_done` of a piece; it may come before `handed`."""
        with self._lock:
            if piece in self._live:
                self._live.remove(piece)
            else:
                self._ended_early.add(piece)
            self._posted += piece.posted
            self._completed += piece.completed
            self._below -= 1
        if piece.error is not None:
            self.stop(piece.error)
        self._settle()

    def _settle(self) -> None:
        with self._lock:
            if self._finished or self._held_back or self._below:
                return
            self._finished = True
        if self._completed == self.total:
            self.error = None
        if self.on_finished is not None:
            self.on_finished(self)
        self.finished_at = time.monotonic()
        self._done.set()
        if self.on_done is not None:
            guarded(self.on_done, self)

    def __str__(self) -> str:
        return f"transfer {self.number}" + (f" to {self.peer}" if self.peer else "")
