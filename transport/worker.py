"""What the one thread of a transport does whatever library it calls: requests, callbacks, closing, its own end."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from transport.closing import Closing
from transport.closing import LinkEnd as Closable
from transport.descriptors import Memory
from transport.errors import TransportClosed, TransportError, TransportFailed
from transport.imm import Imm, ImmediateCounters
from transport.inbox import Inbox, attempted, begin
from transport.outgoing import Outbox
from transport.parking import Parking
from transport.transfer import TransferState

log = logging.getLogger(__name__)


class LinkEnd(Closable, Protocol):
    """The worker's side of a link, as far as every worker needs it."""

    @property
    def peer(self) -> str: ...

    def expose(self, memory: Memory) -> tuple[int, tuple[bytes, ...]]: ...
    def submit(self, transfer: TransferState) -> None: ...
    def close(self) -> None: ...
    def fail(self, error: TransportError) -> None: ...


@dataclass(frozen=True, slots=True)
class Poller:
    """What a thread that polls a transport holds: to call it is one turn, without waiting. See `Worker.polling`."""

    turn: Callable[[], None]
    look_for: Callable[[Imm, int], None]
    counters: ImmediateCounters

    def __call__(self) -> None:
        self.turn()

    def wait(self, imm: Imm, count: int, timeout_s: float | None = None) -> bool:
        """Polls until `count` of the armed `imm` have come, in all; False if they have not within the timeout.

        Raises KeyError if `imm` is not armed.
        """
        received, look_for = self.counters.received, self.look_for
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while received(imm) < count:
            if deadline is not None and time.monotonic() > deadline:
                return False
            look_for(imm, count)
        return True


class Wakeable(Protocol):
    """How the thread rests."""

    def wake(self) -> None: ...
    def close(self) -> None: ...


E = TypeVar("E", bound=LinkEnd)


class Worker(ABC, Generic[E]):
    """Owns the links. Public methods may be called from any thread, callbacks included.

    `error` is what ended the thread, None in an orderly life. Either way nobody is left waiting for it.
    """

    def __init__(self, name: str, counters: ImmediateCounters, rest: Wakeable) -> None:
        self.outbox = Outbox()
        self.error: TransportFailed | None = None
        self.inbox = Inbox(rest.wake)
        self._counters = counters
        self._ends: list[E] = []
        self._closing = Closing[E](self._end, self._pump_all)
        self._parking = Parking(self.inbox)
        self._stopping = False
        self._fault: BaseException | None = None
        self._resting_place = rest
        self._thread = threading.Thread(target=self._run, name=f"transport-{name}", daemon=True)

    def _begin(self) -> None:
        """The last line of a worker's constructor. Raises TransportError where no thread can be had."""
        begin(self._thread, self._resting_place)

    @abstractmethod
    def _turn(self) -> bool:
        """Drains and posts every link; True if anything moved."""

    @abstractmethod
    def _wait(self) -> None:
        """Rests until there is something to do."""

    @abstractmethod
    def _pump_all(self, end: E) -> object:
        """Moves one link on."""

    @abstractmethod
    def _watch(self) -> None:
        """The links have changed: what is rested on."""

    @abstractmethod
    def _release(self) -> None:
        """The links are closed and the thread ends: lets go of the library."""

    @property
    def links_open(self) -> int:
        return len(self._ends)

    def submit(self, end: E, transfer: TransferState) -> None:
        """On the worker, or from any thread. Raises TransportClosed."""
        inbox = self.inbox
        if inbox.on_worker:
            inbox.check_open()
            self._submit(end, transfer)
        else:
            inbox.send(partial(self._submit, end, transfer))

    def expose(self, end: E, memory: Memory) -> tuple[int, tuple[bytes, ...]]:
        """(base, keys)."""
        found: tuple[int, tuple[bytes, ...]] = self.inbox.call(lambda: self._expose(end, memory))
        return found

    def close_end(self, end: E) -> None:
        """Returns when the link is closed and its callbacks have been called. Idempotent."""
        if self.inbox.on_worker:
            self._closing.at_once([end])
            return
        closed = threading.Event()
        try:
            self.inbox.send(lambda: self._closing.begin(end, closed))
        except TransportClosed:
            return
        closed.wait()

    @contextmanager
    def polling(self) -> Iterator[Poller]:
        """The calling thread is the worker while this lasts; see `OwnedTransport.polling`."""
        with self._parking.stand_in(self._thread):
            yield Poller(self._poll, self._look_for, self._counters)

    def stop(self) -> None:
        """Closes all links and joins the thread. Raises TransportError when called from a callback."""
        if self.inbox.on_worker:
            raise TransportError("a transport cannot be closed from its own callbacks, nor while it is polled")
        with suppress(TransportClosed):  # the thread has ended by an error, or is about to
            self.inbox.send(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        self._stopping = True

    def _check_going_on(self) -> None:
        if self._stopping:
            raise TransportClosed("the transport is closing")

    def _expose(self, end: E, memory: Memory) -> tuple[int, tuple[bytes, ...]]:
        return end.expose(memory)

    def _submit(self, end: E, transfer: TransferState) -> None:
        try:
            end.submit(transfer)
        except Exception as error:
            failure = self._break(end, error)
            if not transfer.done:  # it had not even been queued
                transfer.stop(failure)
                transfer.finish()
                self.outbox.finished.append(transfer)

    def _end(self, end: E, error: TransportError | None = None) -> None:
        """Whatever closing does, the link is not looked at again."""
        attempted(end.close if error is None else partial(end.fail, error), "closing a link")
        if end in self._ends:
            self._ends.remove(end)
        self._watch()

    def _break(self, end: E, error: Exception) -> TransportError:
        log.exception("the link to %s failed and is closed", end.peer or "a peer")
        failure = error if isinstance(error, TransportError) else TransportError(f"the link failed: {error!r}")
        self._end(end, failure)
        return failure

    def _run(self) -> None:
        self.inbox.attach()
        try:
            self._prepare()
            while not self._stopping:
                if not self._step():
                    self._wait()
                if self._fault is not None:
                    raise self._fault
        except BaseException as error:
            log.critical("the transport's worker thread failed", exc_info=True)
            self.error = TransportFailed(f"the transport's worker thread has failed, open a new transport: {error!r}")
        self._end_all()

    @staticmethod
    def _prepare() -> None:
        """First of all, on the thread."""

    def _poll(self) -> None:
        try:
            self._step()
        except BaseException as error:
            self._fault = error
            raise

    def _look_for(self, imm: Imm, count: int) -> None:
        """A turn for who waits for nothing but `count` immediates; it may take as long as a millisecond."""
        self._poll()

    def _step(self) -> bool:
        """One turn without waiting; True if anything moved."""
        moved = self.inbox.take()
        moved = self._turn() or moved
        if self._closing.lingering:
            self._closing.turn()
        # What a callback has asked for may have to wait for the next turn: no rest before it.
        return self._call_back() or moved

    def _call_back(self) -> bool:
        """True if there was something to deliver."""
        outbox = self.outbox
        due = bool(outbox.imms or outbox.messages or outbox.finished)
        if not due and not self._closing.ended:
            return False
        try:
            outbox.deliver(self._counters)
        finally:
            self._closing.tell()
        return due

    def _end_all(self) -> None:
        self._stopping = True
        ends = list(self._ends)
        close = self._closing.at_once if self.error is None else self._fail_all
        attempted(partial(close, ends), "closing the links of a transport")
        attempted(partial(self.inbox.end, self.error), "ending a transport")
        attempted(self._call_back, "the last callbacks of a transport")
        self._closing.tell_all()
        attempted(self._release, "letting go of a transport's library")
        self._resting_place.close()

    def _fail_all(self, ends: Sequence[E]) -> None:
        for end in ends:
            attempted(partial(self._end, end, self.error), "closing a link")
