"""One named thread that takes events in order: all state of a sender or receiver belongs to it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Event = TypeVar("Event")

_log = logging.getLogger(__name__)


class Mailbox(Generic[Event]):
    """Runs `handle(event)` for every posted event, and `between()` after each and whenever time is up.

    `between` returns how long to wait for the next event at most, in seconds. An exception in either is logged and
    isolated: one broken event must not stop the others.
    """

    def __init__(self, name: str, handle: Callable[[Event], None], between: Callable[[], float]) -> None:
        self._handle = handle
        self._between = between
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """After everything that the handlers use is in place; events posted before wait."""
        self._thread.start()

    def post(self, event: Event) -> None:
        """Thread-safe; never blocks."""
        self._queue.put(event)

    @property
    def idle(self) -> bool:
        """For `between`: everything that was posted before this call has been handled."""
        return self._queue.empty()

    def close(self) -> None:
        """Takes the events posted so far, then ends the thread. Idempotent."""
        self._queue.put(None)
        if self._thread.ident and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        wait_s = 0.0
        while True:
            try:
                event = self._queue.get(timeout=max(wait_s, 1e-5))
            except queue.Empty:
                pass
            else:
                if event is None:
                    return
                self._guarded(lambda event=event: self._handle(event))  # type: ignore[misc]
            wait_s = self._guarded(self._between) or 0.05

    def _guarded(self, call: Callable[[], float | None]) -> float | None:
        try:
            return call()
        except Exception:
            _log.exception("%s: an event failed", self._thread.name)
            return None
