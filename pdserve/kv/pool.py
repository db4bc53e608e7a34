"""Who owns which page: a thread-safe allocator of page indices. It never touches the pages' bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from pdserve.errors import OutOfPages
from pdserve.types import PageIndex

_FREE, _USED, _QUARANTINED = 0, 1, 2
_STATE_NAMES = ("free", "used", "quarantined")


class PageMisuse(AssertionError):
    """Our own fault: a page was freed twice, or handed back by somebody who does not own it."""


class PagePool:
    """Pages `0 .. total - 1`, each free, used or quarantined.

    Quarantined pages may still be hit by a remote write: nobody owns them and nobody gets them until `release`.
    Every call is atomic: it changes all the pages it was given, or none. Safe from any thread.
    """

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"a page pool needs at least one page, not {pages}")
        self._lock = threading.Lock()
        self._states = bytearray(pages)
        self._free = [PageIndex(page) for page in reversed(range(pages))]  # a stack: what was freed last is warm
        self._quarantined = 0
        self._subscribers: list[Callable[[], None]] = []

    @property
    def total(self) -> int:
        return len(self._states)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def quarantined_pages(self) -> int:
        return self._quarantined

    @property
    def used_pages(self) -> int:
        with self._lock:
            return self.total - len(self._free) - self._quarantined

    def counts(self) -> tuple[int, int, int]:
        """(free, used, quarantined) at one moment; they add up to `total`."""
        with self._lock:
            free = len(self._free)
            return free, self.total - free - self._quarantined, self._quarantined

    def allocate(self, count: int, *, leave_free: int = 0) -> tuple[PageIndex, ...]:
        """`count` pages, now used and the caller's own.

        `leave_free` pages must remain free afterwards: room for the growth of sequences that already run.
        Raises OutOfPages, and takes nothing.
        """
        if count < 0:
            raise PageMisuse(f"cannot allocate {count} pages")
        if count == 0:
            return ()
        with self._lock:
            if len(self._free) < count + leave_free:
                raise OutOfPages(self._shortage(count, leave_free))
            taken = tuple(reversed(self._free[-count:]))
            del self._free[-count:]
            for page in taken:
                self._states[page] = _USED
        return taken

    def free(self, pages: Iterable[PageIndex]) -> None:
        """used -> free."""
        self._move(pages, _USED, _FREE)

    def quarantine(self, pages: Iterable[PageIndex]) -> None:
        """used -> quarantined: given up by the owner, while a remote write may still land."""
        self._move(pages, _USED, _QUARANTINED)

    def release(self, pages: Iterable[PageIndex]) -> None:
        """quarantined -> free: no write can land any more."""
        self._move(pages, _QUARANTINED, _FREE)

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls `callback` whenever pages became free, on the thread that freed them and outside the pool's lock.

        It must not block. Returns what ends the subscription.
        """
        with self._lock:
            self._subscribers = [*self._subscribers, callback]
        return lambda: self._unsubscribe(callback)

    def _unsubscribe(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._subscribers = [other for other in self._subscribers if other is not callback]

    def _move(self, pages: Iterable[PageIndex], before: int, after: int) -> None:
        moving = tuple(pages)
        if not moving:
            return
        with self._lock:
            self._check(moving, before, after)
            for page in moving:
                self._states[page] = after
            if before == _QUARANTINED:
                self._quarantined -= len(moving)
            if after == _QUARANTINED:
                self._quarantined += len(moving)
            else:
                self._free.extend(moving)
            subscribers = self._subscribers if after == _FREE else []
        for subscriber in subscribers:
            subscriber()

    def _check(self, pages: tuple[PageIndex, ...], before: int, after: int) -> None:
        step = f"cannot move to {_STATE_NAMES[after]}"
        if len(set(pages)) != len(pages):
            raise PageMisuse(f"{step}: a page is named twice in {list(pages)}")
        for page in pages:
            if not 0 <= page < self.total:
                raise PageMisuse(f"{step}: there is no page {page} in a pool of {self.total}")
            if self._states[page] != before:
                was, need = _STATE_NAMES[self._states[page]], _STATE_NAMES[before]
                raise PageMisuse(f"{step}: page {page} is {was}, not {need}")

    def _shortage(self, count: int, leave_free: int) -> str:
        free = len(self._free)
        used = self.total - free - self._quarantined
        kept = f", {leave_free} of them kept for running sequences" if leave_free else ""
        return (
            f"{count} pages asked for, but {free} of {self.total} are free{kept}"
            f" ({used} used, {self._quarantined} quarantined)"
        )
