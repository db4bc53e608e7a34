"""How other threads ask things of a worker thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from transport.errors import TransportClosed

log = logging.getLogger(__name__)


class _Call:
    """A function for the worker, and where its result goes."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._done = threading.Event()
        self._result: Any = None
        self._error: Exception | None = None

    def __call__(self) -> None:
        try:
            self._result = self._function()
        except Exception as error:
            self._error = error
        self._done.set()

    def result(self) -> Any:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Inbox:
    """Functions for a worker, in order. `wake` ends the worker's rest; it is called only while the worker rests."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._functions: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._resting = self._ended = False
        self._worker: threading.Thread | None = None

    @property
    def on_worker(self) -> bool:
        return threading.current_thread() is self._worker

    def send(self, function: Callable[[], None]) -> None:
        """Runs `function` on the worker, soon and in order. Raises TransportClosed."""
        with self._lock:
            if self._ended:
                raise TransportClosed("the transport is closed")
            self._functions.append(function)
            if self._resting:
                self._wake()

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs `function` on the worker and returns its result, or raises its error. Raises TransportClosed."""
        if self.on_worker:
            return function()
        call = _Call(function)
        self.send(call)
        return call.result()

    def nudge(self) -> None:
        """Ends the worker's rest."""
        with self._lock:
            if self._resting and not self._ended:
                self._wake()

    def attach(self) -> None:
        """The calling thread is the worker from now on."""
        self._worker = threading.current_thread()

    def begin_rest(self) -> bool:
        """False if there is something to do. Otherwise every `send` and `nudge` wakes, until `end_rest`."""
        self._resting = True
        if self._functions:
            self._resting = False
        return self._resting

    def end_rest(self) -> None:
        self._resting = False

    def take(self) -> bool:
        """Runs what has come; True if anything had."""
        moved = False
        while self._functions:
            moved = True
            function = self._functions.popleft()
            try:
                function()
            except Exception:
                log.exception("a request to the transport failed")
        return moved

    def end(self) -> None:
        """Refuses from now on, and runs what had come before."""
        with self._lock:
            self._ended = True
        self.take()


def guarded(callback: Callable[[Any], None], argument: Any) -> None:
    """A callback's exception must not reach the worker."""
    try:
        callback(argument)
    except Exception:
        log.exception("a transport callback raised; the transport goes on")
