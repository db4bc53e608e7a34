"""A thread that does things later: what the fault layer holds back."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from transport.inbox import attempted


class Schedule:
    """Runs functions when they are due; those of the same moment in the order in which they came. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._heap: list[tuple[float, int, object, Callable[[], Any]]] = []
        self._sequence = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def on_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def at(self, due: float, owner: object, function: Callable[[], Any]) -> None:
        """`due` is a time of `time.monotonic`. After `close` nothing runs any more."""
        with self._changed:
            heapq.heappush(self._heap, (due, next(self._sequence), owner, function))
            self._changed.notify()

    def forget(self, owner: object) -> None:
        """What waits for this owner will not run."""
        with self._changed:
            self._heap = [entry for entry in self._heap if entry[2] is not owner]
            heapq.heapify(self._heap)

    def close(self) -> None:
        """Idempotent."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify()
        if not self.on_thread:
            self._thread.join()

    def _run(self) -> None:
        while (function := self._next()) is not None:
            attempted(function, "what a fault had held back")

    def _next(self) -> Callable[[], Any] | None:
        with self._changed:
            while not self._closed:
                wait_s = self._heap[0][0] - time.monotonic() if self._heap else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._heap)[3]
                self._changed.wait(wait_s)
        return None
