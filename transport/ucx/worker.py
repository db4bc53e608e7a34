"""The one thread that makes every UCX call of a transport: it polls, posts, closes, calls back and rests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from transport.api import Memory, OnMessage
from transport.closing import Closing
from transport.errors import TransportClosed, TransportError, TransportFailed
from transport.imm import ImmediateCounters
from transport.inbox import Inbox, attempted, begin
from transport.outgoing import Outbox
from transport.transfer import retire
from transport.ucx.binding import Loops
from transport.ucx.context import Context, Region
from transport.ucx.link_end import LinkEnd, UcxSource
from transport.ucx.posting import Rest, precise_sleep

log = logging.getLogger(__name__)

_SPINS = 40
_BUSY_NS = 5_000_000
"""Longest sleep while something is armed or under way: UCX's descriptors wake it, this only bounds a lost wake-up."""
_BLOCKED_NS = 50_000_000
_IDLE_NS = 1_000_000_000


class Worker:
    """Owns the context and the links. Public methods may be called from any thread, callbacks included.

    `error` is what ended the thread, None in an orderly life. Either way nobody is left waiting for it.
    """

    def __init__(self, context: Context, loops: Loops, counters: ImmediateCounters, stall_timeout_s: float) -> None:
        self.outbox = Outbox()
        self.error: TransportFailed | None = None
        self._context, self._loops, self._counters = context, loops, counters
        self._stall_timeout_s = stall_timeout_s
        self._rest = Rest(loops, context.table)
        self.inbox = Inbox(self._rest.wake)
        self._ends: list[LinkEnd] = []
        self._closing = Closing[LinkEnd](self._end, self._pump)
        self._stopping = False
        self._fault: BaseException | None = None
        self._polling = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="transport-ucx", daemon=True)
        begin(self._thread, self._rest)

    @property
    def links_open(self) -> int:
        return len(self._ends)

    def register(self, memory: Memory) -> Region:
        """Raises FabricError, ProviderUnavailable."""
        region: Region = self.inbox.call(lambda: self._context.register_source(memory))
        return region

    def release(self, source: UcxSource) -> None:
        """Raises RegionBusy while something reads from it."""
        self.inbox.call(lambda: self._release(source))

    def _release(self, source: UcxSource) -> None:
        retire(source)
        self._context.release(source.region)

    def open_end(self, on_message: OnMessage | None) -> LinkEnd:
        end: LinkEnd = self.inbox.call(lambda: self._open_end(on_message))
        return end

    def expose(self, end: LinkEnd, memory: Memory) -> tuple[int, tuple[bytes, ...]]:
        """(base, keys)."""
        found: tuple[int, tuple[bytes, ...]] = self.inbox.call(lambda: end.expose(memory))
        return found

    def close_end(self, end: LinkEnd) -> None:
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
    def polling(self) -> Iterator[Callable[[], None]]:
        """The calling thread is the worker while this lasts; see `UcxTransport.polling`."""
        if self.inbox.on_worker:
            raise TransportError("the callbacks of a transport cannot poll it")
        if not self._polling.acquire(blocking=False):
            raise TransportError("another thread polls this transport already")
        parked, resume = threading.Event(), threading.Event()

        def park() -> None:
            parked.set()
            resume.wait()

        try:
            self.inbox.send(park)
            parked.wait()
            self.inbox.attach()
            try:
                yield self._poll
            finally:
                self.inbox.attach(self._thread)
                resume.set()
        finally:
            self._polling.release()

    def stop(self) -> None:
        """Closes all links, joins the thread, closes the context. Raises TransportError when called from a callback."""
        if self.inbox.on_worker:
            raise TransportError("a transport cannot be closed from its own callbacks, nor while it is polled")
        with suppress(TransportClosed):  # the thread has ended by an error, or is about to
            self.inbox.send(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        self._stopping = True

    def _open_end(self, on_message: OnMessage | None) -> LinkEnd:
        if self._stopping:
            raise TransportClosed("the transport is closing")
        end = LinkEnd(self._context, self._loops, self.outbox, self._stall_timeout_s)
        end.on_message = on_message
        self._ends.append(end)
        self._watch()
        return end

    def _end(self, end: LinkEnd, error: TransportError | None = None) -> None:
        """Whatever closing does, the link is not looked at again."""
        attempted(end.close if error is None else partial(end.fail, error), "closing a link")
        if end in self._ends:
            self._ends.remove(end)
        self._watch()

    def _watch(self) -> None:
        self._rest.watch([(end.channel.worker, end.channel.event_fd) for end in self._ends])

    def _run(self) -> None:
        self.inbox.attach()
        try:
            precise_sleep()
            while not self._stopping:
                if not self._step():
                    self._wait()
                if self._fault is not None:
                    raise self._fault
        except BaseException as error:
            log.critical("the transport's worker thread failed", exc_info=True)
            self.error = TransportFailed(f"the transport's worker thread has failed, open a new transport: {error!r}")
        self._end_all()

    def _poll(self) -> None:
        try:
            self._step()
        except BaseException as error:
            self._fault = error
            raise

    def _step(self) -> bool:
        """One turn without waiting; True if anything moved."""
        moved = self.inbox.take()
        for end in tuple(self._ends):
            moved = self._pump(end) or moved
        if self._closing.lingering:
            self._closing.turn()
        self._call_back()
        return moved

    def _pump(self, end: LinkEnd) -> bool:
        try:
            return end.pump()
        except Exception as error:
            log.exception("the link to %s failed and is closed", end.peer or "a peer")
            failure = error if isinstance(error, TransportError) else TransportError(f"the link failed: {error!r}")
            self._end(end, failure)
            return True

    def _wait(self) -> None:
        """Rests until there is something to do."""
        # First, so that who begins to wait after `busy` is known wakes this thread.
        if not self.inbox.begin_rest():
            return
        busy = bool(self._closing.lingering) or self._counters.waiting > 0 or any(end.busy for end in self._ends)
        blocked = any(end.blocked for end in self._ends)
        self._rest(_SPINS if busy else 0, _BLOCKED_NS if blocked else _BUSY_NS if busy else _IDLE_NS)
        self.inbox.end_rest()

    def _call_back(self) -> None:
        try:
            self.outbox.deliver(self._counters)
        finally:
            self._closing.tell()

    def _end_all(self) -> None:
        self._stopping = True
        ends = list(self._ends)
        close = self._closing.at_once if self.error is None else self._fail_all
        attempted(partial(close, ends), "closing the links of a transport")
        attempted(partial(self.inbox.end, self.error), "ending a transport")
        attempted(self._call_back, "the last callbacks of a transport")
        self._closing.tell_all()
        attempted(self._context.close, "closing a UCX context")
        self._rest.close()

    def _fail_all(self, ends: list[LinkEnd]) -> None:
        for end in ends:
            self._end(end, self.error)
