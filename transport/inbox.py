"""How other threads ask things of a worker thread."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from transport.errors import TransportClosed, TransportError

log = logging.getLogger(__name__)


class _Call:
    """A function for the worker, and where its result goes."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def __call__(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # also SystemExit: the caller waits for an answer
            self._error = error
        self._done.set()

    def refuse(self, error: TransportError) -> None:
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
        self._functions: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._resting = False
        self._ended: TransportError | None = None
        self._worker: threading.Thread | None = None

    @property
    def on_worker(self) -> bool:
        return threading.current_thread() is self._worker

    def send(self, function: Callable[[], object]) -> None:
        """Runs `function` on the worker, soon and in order; at once if this is the worker. Raises TransportClosed."""
        if self.on_worker:
            self.check_open()
            function()
            return
        with self._lock:
            self.check_open()
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

    def check_open(self) -> None:
        """Raises TransportClosed."""
        if self._ended is not None:
            raise type(self._ended)(str(self._ended))

    def nudge(self) -> None:
        """Ends the worker's rest."""
        with self._lock:
            if self._resting and self._ended is None:
                self._wake()

    def attach(self, worker: threading.Thread | None = None) -> None:
        """`worker`, or the calling thread, is the worker from now on."""
        self._worker = worker or threading.current_thread()

    def begin_rest(self) -> bool:
        """False if there is something to do. Otherwise every `send` and `nudge` wakes, until `end_rest`."""
        self._resting = True
        if self._functions:
            self._resting = False
        return self._resting

    def end_rest(self) -> None:
        self._resting = False

    def take(self) -> bool:
        """Runs what has come until now, so that callers in a hurry do not starve the rest; True if anything had."""
        count = len(self._functions)  # what comes meanwhile waits for the next turn
        for _ in range(count):
            attempted(self._functions.popleft(), "a request to the transport")
        return count > 0

    def end(self, failure: TransportError | None = None) -> None:
        """Refuses from now on, and runs what had come before. After a failure the calls among it are refused too."""
        with self._lock:
            self._ended = failure or TransportClosed("the transport is closed")
        if failure is not None:
            for function in self._functions:
                if isinstance(function, _Call):
                    function.refuse(failure)
            self._functions = deque(f for f in self._functions if not isinstance(f, _Call))
        self.take()


class Closable(Protocol):
    def close(self) -> None: ...


def begin(worker: threading.Thread, rest: Closable) -> None:
    """Starts a worker's thread; `rest` is closed if there can be none. Raises TransportError then."""
    try:
        worker.start()
    except RuntimeError as error:
        rest.close()
        raise TransportError(f"no thread could be started for a transport ({error}): too many run here") from error


def pin(inbox: Inbox, cpu: int) -> None:
    """Keeps the worker on one CPU. Raises ValueError, saying which there are; TransportClosed."""
    try:
        inbox.call(lambda: os.sched_setaffinity(0, {cpu}))
    except OSError as error:
        there = ", ".join(map(str, sorted(os.sched_getaffinity(os.getpid()))))
        raise ValueError(f"the worker cannot be kept on CPU {cpu} ({error.strerror}); allowed: {there}") from error


def guarded(callback: Callable[[Any], None], argument: Any) -> None:
    """A callback's exception must not reach the worker, SystemExit included."""
    try:
        callback(argument)
    except BaseException:
        log.exception("a transport callback raised; the transport goes on")


def attempted(step: Callable[[], Any], name: str) -> Exception | None:
    """One step of several that are taken whatever becomes of the others; its exception is logged and returned."""
    try:
        step()
    except Exception as error:
        log.exception("%s failed", name)
        return error
    return None
