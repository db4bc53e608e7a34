"""Another thread stands in for a worker: the worker is parked, and its inbox takes the other for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from transport.errors import TransportError
from transport.inbox import Inbox


class Parking:
    """`taken` while a thread stands in."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._lock = threading.Lock()
        self.taken = False

    @contextmanager
    def stand_in(self, worker: threading.Thread) -> Iterator[None]:
        """Raises TransportError on the worker itself and while another thread stands in; TransportClosed."""
        if self._inbox.on_worker:
            raise TransportError("the callbacks of a transport cannot poll it")
        if not self._lock.acquire(blocking=False):
            raise TransportError("another thread polls this transport already")
        try:
            resume = self._park()
            self._inbox.attach()
            self.taken = True
            try:
                yield
            finally:
                self.taken = False
                self._inbox.attach(worker)
                resume.set()
        finally:
            self._lock.release()

    def _park(self) -> threading.Event:
        parked, resume = threading.Event(), threading.Event()

        def park() -> None:
            parked.set()
            resume.wait()

        self._inbox.send(park)
        parked.wait()
        return resume
