"""The one thread that makes every libfabric call of a process: it drains, posts, closes, calls back and rests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from transport.api import Memory, OnMessage
from transport.closing import Closing
from transport.errors import TransportClosed, TransportError, TransportFailed
from transport.fabric import abi
from transport.fabric.lane import Lane
from transport.fabric.link_end import LinkEnd
from transport.fabric.pace import ALONE, SHORTEST_NS, SPIN, Pause, pause
from transport.fabric.parking import Parking
from transport.fabric.posting import Loops
from transport.fabric.regions import FabricSource, Nic, register_source, release_source
from transport.fabric.rest import Rest, precise_sleep
from transport.imm import ImmediateCounters
from transport.inbox import Inbox, attempted, begin
from transport.outgoing import Outbox
from transport.transfer import TransferState

log = logging.getLogger(__name__)

_NOTHING = (-abi.FI_EAGAIN, 0)


@dataclass(frozen=True, slots=True)
class Setting:
    """How a worker behaves; see `TransferEngine`."""

    stall_timeout_s: float
    spin: bool | None = None


class Worker:
    """Owns the NICs and the links. Public methods may be called from any thread, callbacks included.

    `error` is what ended the thread, None in an orderly life. Either way nobody is left waiting for it.
    """

    def __init__(self, nics: list[Nic], loops: Loops, counters: ImmediateCounters, setting: Setting) -> None:
        self.outbox = Outbox()
        self.error: TransportFailed | None = None
        self._nics, self._loops, self._counters = nics, loops, counters
        self._profile = nics[0].domain.profile
        self._stall_timeout_s = setting.stall_timeout_s
        self._spin = self._profile.spins if setting.spin is None else setting.spin
        self._rest = Rest(loops)
        self.inbox = Inbox(self._rest.wake)
        self._ends: list[LinkEnd] = []
        self._watched: list[tuple[LinkEnd, Lane]] = []
        self._closing = Closing[LinkEnd](self._end, self._pump_all)
        self._stopping = False
        self._fault: BaseException | None = None
        self._sleep_ns = SHORTEST_NS
        self._parking = Parking(self.inbox)
        self._thread = threading.Thread(target=self._run, name=f"transport-{self._profile.name}", daemon=True)
        begin(self._thread, self._rest)

    @property
    def links_open(self) -> int:
        return len(self._ends)

    def register(self, memory: Memory) -> FabricSource:
        """Raises FabricError if no NIC can register it."""
        source: FabricSource = self.inbox.call(lambda: register_source(self._nics, memory))
        return source

    def release(self, source: FabricSource) -> None:
        self.inbox.call(lambda: release_source(self._nics, source))

    def open_end(self, on_message: OnMessage | None) -> LinkEnd:
        end: LinkEnd = self.inbox.call(lambda: self._open_end(on_message))
        return end

    def expose(self, end: LinkEnd, memory: Memory) -> tuple[int, tuple[bytes, ...]]:
        """(base, keys)."""
        found: tuple[int, tuple[bytes, ...]] = self.inbox.call(lambda: self._expose(end, memory))
        return found

    def submit(self, end: LinkEnd, transfer: TransferState) -> None:
        """On the worker, or from any thread. Raises TransportClosed."""
        inbox = self.inbox
        if inbox.on_worker:
            inbox.check_open()
            self._submit(end, transfer)
        else:
            inbox.send(partial(self._submit, end, transfer))

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
        """The calling thread is the worker while this lasts; see `TransferEngine.polling`."""
        with self._parking.stand_in(self._thread):
            yield self._poll

    def stop(self) -> None:
        """Closes all links, joins the thread, closes the domains. Raises TransportError when called from a callback."""
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
        end = LinkEnd(self._nics, self._loops, self.outbox, self._stall_timeout_s)
        end.talk.on_message = on_message
        self._ends.append(end)
        try:
            if not self._spin and not end.wakes:
                end.doorbell = self._rest.doorbell()
        except OSError as error:
            self._end(end)
            raise TransportError(f"a link needs a socket to be woken by, and got none: {error}") from error
        self._watch()
        return end

    def _expose(self, end: LinkEnd, memory: Memory) -> tuple[int, tuple[bytes, ...]]:
        try:
            return end.expose(memory)
        finally:
            self._watch()  # a NIC that cannot register it is lost

    def _submit(self, end: LinkEnd, transfer: TransferState) -> None:
        try:
            end.submit(transfer)
        except Exception as error:
            failure = self._break(end, error)
            if not transfer.done:  # it had not even been queued
                transfer.stop(failure)
                transfer.finish()
                self.outbox.finished.append(transfer)

    def _end(self, end: LinkEnd, error: TransportError | None = None) -> None:
        """Whatever closing does, the link is not looked at again."""
        attempted(end.close if error is None else partial(end.fail, error), "closing a link")
        if end in self._ends:
            self._ends.remove(end)
        self._watch()

    def _watch(self) -> None:
        self._watched = [(end, lane) for end in self._ends for lane in end.open_lanes]
        self._rest.watch([lane.poster for _, lane in self._watched])

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
        for end, lane in self._watched:
            if lane.closed:  # by what was done for another
                continue
            entries = lane.poster.peek()
            if entries in _NOTHING:
                lane.calm = True
                if not end.stirred:
                    continue
            elif self._parking.taken:
                lane.calm = True
            moved = self._pump(end, lane, entries if entries > 0 else 0) or moved
        if self._closing.lingering:
            self._closing.turn()
        # What a callback has asked for may have to wait for the next turn: no rest before it.
        moved = self._call_back() or moved
        if moved:
            self._sleep_ns = SHORTEST_NS
        return moved

    def _pump(self, end: LinkEnd, lane: Lane, entries: int = 0) -> bool:
        try:
            moved = end.pump(lane, entries)
        except Exception as error:
            self._break(end, error)
            return True
        if lane.closed:
            self._watch()
        return moved

    def _break(self, end: LinkEnd, error: Exception) -> TransportError:
        log.exception("the link to %s failed and is closed", end.peer or "a peer")
        failure = error if isinstance(error, TransportError) else TransportError(f"the link failed: {error!r}")
        self._end(end, failure)
        return failure

    def _pump_all(self, end: LinkEnd) -> None:
        for lane in end.open_lanes:
            self._pump(end, lane)

    def _wait(self) -> None:
        """Rests until there is something to do; what a queue had is taken at once."""
        # First, so that who begins to wait after `busy` is known wakes this thread.
        if not self.inbox.begin_rest():
            return
        queue, code, self._sleep_ns = self._rest(*self._pause())
        self.inbox.end_rest()
        if queue >= 0:
            self._sleep_ns = SHORTEST_NS
            self._pump(*self._watched[queue], max(code, 0))

    def _pause(self) -> Pause:
        if not self._ends:
            return ALONE
        if self._spin:
            return SPIN
        closing = bool(self._closing.lingering)
        # Within one host, whoever writes to what is armed rings.
        armed = self._counters.waiting > 0 and self._profile.reach != "host"
        busy = closing or armed or any(end.busy for end in self._ends)
        blocked = any(end.blocked for end in self._ends)
        return pause(self._sleep_ns, blocked=blocked, sure=self._rest.sure and not closing, busy=busy)

    def _call_back(self) -> bool:
        """True if there was something to deliver."""
        outbox = self.outbox
        due = bool(outbox.imms or outbox.messages or outbox.finished)
        if not due and not self._closing.ended:
            return False
        try:
            self.outbox.deliver(self._counters)
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
        for nic in self._nics:
            attempted(nic.domain.close, "closing a domain")
        self._rest.close()

    def _fail_all(self, ends: list[LinkEnd]) -> None:
        for end in ends:
            self._end(end, self.error)
