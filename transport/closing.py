"""The links of a worker that are being closed: which linger, and who waits for them. Worker thread only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

_LINGER_S = 0.25
"""How long a link that closes waits for what is on its way out."""


class LinkEnd(Protocol):
    """What closing needs of a link."""

    @property
    def drained(self) -> bool:
        """Lingering has nothing left to wait for."""
        ...

    closed: bool

    def begin_close(self) -> bool:
        """Posts nothing more. True if it is worth lingering."""
        ...


E = TypeVar("E", bound=LinkEnd)


class Closing(Generic[E]):
    """`end` closes a link whatever happens, `pump` moves it on. Whatever `begin_close` raises, its link is closed."""

    def __init__(self, end: Callable[[E], object], pump: Callable[[E], object]) -> None:
        self._end, self._pump = end, pump
        self._closed: list[threading.Event] = []
        self.lingering: list[tuple[E, float, threading.Event]] = []

    @property
    def ended(self) -> bool:
        """Somebody is to be told."""
        return bool(self._closed)

    def begin(self, end: E, closed: threading.Event) -> None:
        """`closed` will be set by the `tell` after the end."""
        lingers = False
        try:
            lingers = end.begin_close()
        finally:
            if lingers:
                self.lingering.append((end, time.monotonic() + _LINGER_S, closed))
            else:
                self._end(end)
                self._closed.append(closed)

    def at_once(self, ends: Sequence[E]) -> None:
        """Lingers here, and returns when they are closed."""
        deadline = time.monotonic() + _LINGER_S
        try:
            lingering = [end for end in ends if end.begin_close()]
            while not all(end.drained or end.closed for end in lingering) and time.monotonic() < deadline:
                for end in lingering:
                    self._pump(end)
        finally:
            for end in ends:
                self._end(end)

    def turn(self) -> None:
        """Closes those that have lingered enough."""
        now = time.monotonic()
        for entry in [e for e in self.lingering if e[0].closed or e[0].drained or e[1] < now]:
            self.lingering.remove(entry)
            self._end(entry[0])
            self._closed.append(entry[2])

    def tell(self) -> None:
        """After the callbacks: who waits for a link that has ended goes on."""
        for event in self._closed:
            event.set()
        self._closed.clear()

    def tell_all(self) -> None:
        """The worker ends, and with it every link."""
        self._closed += [closed for _, _, closed in self.lingering]
        self.tell()
