"""The one thread that makes every libfabric call of a process: it drains, posts, closes, calls back and rests."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from functools import partial

from transport.api import Memory
from transport.errors import TransportClosed, TransportError, TransportFailed
from transport.fabric.domain import Domain, Region
from transport.fabric.lane import Lane
from transport.fabric.posting import Loops, Rest, precise_sleep
from transport.imm import ImmediateCounters
from transport.inbox import Inbox, attempted
from transport.outgoing import Outbox

log = logging.getLogger(__name__)

_SPINS = 40
_SHORTEST_NS = 10_000
_BUSY_NS = 200_000
"""Longest sleep while something is armed or in flight: polling then costs about a fiftieth of a core."""
_IDLE_NS = 10_000_000
"""Longest sleep while links are open: so long may a peer's write wait if nothing is armed for it."""
_BLOCKED_NS = 100_000
_BUSY_TOTAL_NS = 20_000_000
_IDLE_TOTAL_NS = 1_000_000_000


class Worker:
    """Owns the domain and its lanes. Public methods may be called from any thread, callbacks included.

    `error` is what ended the thread, None in an orderly life. Either way nobody is left waiting for it.
    """

    def __init__(self, domain: Domain, loops: Loops, counters: ImmediateCounters, stall_timeout_s: float) -> None:
        self.outbox = Outbox()
        self.error: TransportFailed | None = None
        self._domain, self._loops, self._counters = domain, loops, counters
        self._stall_timeout_s = stall_timeout_s
        self._rest = Rest(loops)
        self.inbox = Inbox(self._rest.wake)
        self._lanes: list[Lane] = []
        self._lingering: list[tuple[Lane, float, threading.Event]] = []
        self._closed_now: list[threading.Event] = []
        self._stopping = False
        self._sleep_ns = _SHORTEST_NS
        self._thread = threading.Thread(target=self._run, name=f"transport-{domain.profile.name}", daemon=True)
        self._thread.start()

    @property
    def links_open(self) -> int:
        return len(self._lanes)

    def register(self, memory: Memory) -> Region:
        region: Region = self.inbox.call(lambda: self._domain.register_source(memory))
        return region

    def release(self, region: Region) -> None:
        self.inbox.call(lambda: self._domain.release(region))

    def open_lane(self) -> Lane:
        lane: Lane = self.inbox.call(self._open_lane)
        return lane

    def expose(self, lane: Lane, memory: Memory) -> Region:
        region: Region = self.inbox.call(lambda: self._expose(lane, memory))
        return region

    def close_lane(self, lane: Lane) -> None:
        """Returns when the lane is closed and its callbacks have been called. Idempotent."""
        if self.inbox.on_worker:
            self._close_here([lane])
            return
        closed = threading.Event()
        try:
            self.inbox.send(lambda: self._begin_close(lane, closed))
        except TransportClosed:
            return
        closed.wait()

    def stop(self) -> None:
        """Closes all lanes, joins the thread, closes the domain. Raises TransportError when called from a callback."""
        if self.inbox.on_worker:
            raise TransportError("a transport cannot be closed from its own callbacks")
        with suppress(TransportClosed):  # the thread has ended by an error, or is about to
            self.inbox.send(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        self._stopping = True

    def _open_lane(self) -> Lane:
        if self._stopping:
            raise TransportClosed("the transport is closing")
        lane = Lane(self._domain, self._loops, self.outbox, self._stall_timeout_s)
        self._lanes.append(lane)
        self._watch()
        return lane

    def _expose(self, lane: Lane, memory: Memory) -> Region:
        lane.check_open()
        region = self._domain.expose(memory)
        lane.keep(region)
        return region

    def _begin_close(self, lane: Lane, closed: threading.Event) -> None:
        lingers = False
        try:
            lingers = lane.begin_close()
        finally:
            if lingers:
                self._lingering.append((lane, time.monotonic() + self._domain.profile.linger_s, closed))
            else:
                self._end_lane(lane)
                self._closed_now.append(closed)

    def _close_here(self, lanes: list[Lane]) -> None:
        deadline = time.monotonic() + self._domain.profile.linger_s
        try:
            lingering = [lane for lane in lanes if lane.begin_close()]
            while any(lane.outgoing.in_flight for lane in lingering) and time.monotonic() < deadline:
                for lane in lingering:
                    self._pump(lane)
        finally:
            for lane in lanes:
                self._end_lane(lane)

    def _end_lane(self, lane: Lane, error: TransportError | None = None) -> None:
        """Whatever closing does, the lane is not looked at again."""
        attempted(lane.close if error is None else partial(lane.fail, error), "closing a link")
        if lane in self._lanes:
            self._lanes.remove(lane)
        self._watch()

    def _end_lingering(self) -> None:
        now = time.monotonic()
        for entry in [e for e in self._lingering if not e[0].outgoing.in_flight or e[1] < now]:
            self._lingering.remove(entry)
            self._end_lane(entry[0])
            self._closed_now.append(entry[2])

    def _watch(self) -> None:
        self._rest.watch([lane.poster for lane in self._lanes])

    def _run(self) -> None:
        self.inbox.attach()
        try:
            precise_sleep()
            while not self._stopping:
                self._turn()
        except BaseException as error:
            log.critical("the transport's worker thread failed", exc_info=True)
            self.error = TransportFailed(f"the transport's worker thread has failed, open a new transport: {error!r}")
        self._end()

    def _turn(self) -> None:
        moved = self.inbox.take()
        for lane in tuple(self._lanes):
            moved = self._pump(lane) or moved
        if self._lingering:
            self._end_lingering()
        self._call_back()
        if moved:
            self._sleep_ns = _SHORTEST_NS
        else:
            self._wait()

    def _pump(self, lane: Lane, entries: int = 0) -> bool:
        try:
            return lane.pump(entries)
        except Exception as error:
            log.exception("the link to %s failed and is closed", lane.peer or "a peer")
            failure = error if isinstance(error, TransportError) else TransportError(f"the link failed: {error!r}")
            self._end_lane(lane, failure)
            return True

    def _wait(self) -> None:
        """Rests until there is something to do; what a queue had is taken at once."""
        # First, so that who begins to wait after `busy` is known wakes this thread.
        if not self.inbox.begin_rest():
            return
        busy = bool(self._lingering) or self._counters.waiting > 0 or any(lane.outgoing.busy for lane in self._lanes)
        blocked = any(lane.blocked for lane in self._lanes)
        longest = _BUSY_NS if busy else _IDLE_NS if self._lanes else _IDLE_TOTAL_NS
        total = _BLOCKED_NS if blocked else _BUSY_TOTAL_NS if busy else _IDLE_TOTAL_NS
        spins = _SPINS if self._sleep_ns <= _SHORTEST_NS and self._lanes else 0
        queue, code, self._sleep_ns = self._rest(spins, min(self._sleep_ns, longest), longest, total)
        self.inbox.end_rest()
        if queue >= 0:
            self._sleep_ns = _SHORTEST_NS
            self._pump(self._lanes[queue], max(code, 0))

    def _call_back(self) -> None:
        try:
            self.outbox.deliver(self._counters)
        finally:
            for event in self._closed_now:
                event.set()
            self._closed_now.clear()

    def _end(self) -> None:
        self._stopping = True
        self._closed_now.extend(closed for _, _, closed in self._lingering)
        close = self._close_here if self.error is None else self._fail_all
        attempted(partial(close, list(self._lanes)), "closing the links of a transport")
        attempted(partial(self.inbox.end, self.error), "ending a transport")
        attempted(self._call_back, "the last callbacks of a transport")
        attempted(self._domain.close, "closing a domain")
        self._rest.close()

    def _fail_all(self, lanes: list[Lane]) -> None:
        for lane in lanes:
            self._end_lane(lane, self.error)
