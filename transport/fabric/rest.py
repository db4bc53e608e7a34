"""How a worker thread waits: for completions on any of several queues, for its doorbell, or to be asked something."""

from __future__ import annotations

import ctypes as c
import os
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from transport.doorbell import Doorbell
from transport.fabric import abi
from transport.fabric.pace import Pause
from transport.fabric.posting import CLOCK, Loops, Poster
from transport.imm import FEW, Watched

_POLLIN = 1
_FIXED = 2
"""Descriptors that are always waited for: the event, and the doorbell or nothing."""
_LIBC = c.CDLL(None)
_PPOLL = abi.address_of(_LIBC.ppoll)
_PR_SET_TIMERSLACK = 29
_KEPT_WORDS = 1 + abi.CQ_ENTRY_WORDS


class Rest:
    """`wake` may be called from any thread.

    `imms` were collected by the last call, `(n,) int64`. So were completions of own writes, which `take_kept` gives.
    """

    def __init__(self, bound: Loops, counters: Watched) -> None:
        self._loops = bound
        self._counters = counters
        self.imms: NDArray[np.int64] | list[int] = []
        self._kept = 0
        self._bell: Doorbell | None = None
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = np.zeros(1, np.int64)
        self.watch([])

    def watch(self, posters: list[Poster]) -> None:
        """From now on it waits for these queues; their order gives the numbers that `__call__` returns."""
        rows = [[p.read, p.cq, p.fabric, p.trywait] for p in posters]
        self._queues = np.array(rows, np.int64).reshape(len(posters), 4)
        bell = -1 if self._bell is None else self._bell.fileno()
        fds = [self._event, bell, *(poster.wait_fd for poster in posters)]
        self._polls = np.array([fd & 0xFFFFFFFF | _POLLIN << 32 for fd in fds], np.int64)
        self._queues_address, self._polls_address = int(self._queues.ctypes.data), int(self._polls.ctypes.data)
        self.sure = all(poster.wait_fd >= 0 for poster in posters)
        """Whatever comes wakes it: it need not look from time to time."""

    def __call__(self, pause: Pause, patient: bool = False) -> tuple[int, int, int]:
        """See `loops.rest`."""
        out, counters = self._loops.scratch, self._counters
        queue, code, sleep_ns, count, self._kept = self._loops.rest(
            self._queues, self._queues_address, out.entries, out.address, out.imms, counters.armed, counters.left,
            out.kept, patient, self._woken, *pause,
            CLOCK, _PPOLL, self._polls, self._polls_address, _FIXED, out.timespec, out.timespec_address,
        )  # fmt: skip
        self.imms = out.imms[:count].tolist() if count <= FEW else out.imms[:count].copy()
        if queue == -2:
            self._answer()
        return queue, code, sleep_ns

    def take_kept(self) -> list[tuple[int, int]]:
        """(queue, context) of each completion that was kept; before the next call, and before `watch`."""
        count, self._kept = self._kept, 0
        if not count:
            return []
        rows = self._loops.scratch.kept[: count * _KEPT_WORDS].reshape(count, _KEPT_WORDS)
        return [(queue, context) for queue, context in rows[:, :2].tolist()]

    def doorbell(self) -> bytes:
        """The name of the socket that ends a rest from outside; made when it is first asked for."""
        if self._bell is None:
            self._bell = Doorbell()
        return self._bell.name

    def wake(self) -> None:
        self._woken[0] = 1
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Idempotent."""
        if self._event >= 0:
            os.close(self._event)
            self._event = -1
        if self._bell is not None:
            self._bell.close()
            self._bell = None

    def _answer(self) -> None:
        self._woken[0] = 0
        with suppress(BlockingIOError):  # it was not this that woke
            os.eventfd_read(self._event)
        if self._bell is not None:
            self._bell.answer()


def precise_sleep() -> None:
    """Lets this thread sleep for tens of microseconds: by default the kernel adds up to 50."""
    _LIBC.prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
