"""`LoopbackTransport`: the transport inside one process, for tests and experiments.

It keeps what a caller may rely on (see `transport.api`) and uses every freedom that a fabric has: writes land in any
order, late, and complete locally before or after they land. Transports that share a `LoopbackNet` reach each other.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Self

import numpy as np

from transport.api import Imm, Memory, SourceRegion
from transport.errors import LinkClosed, PeerLost, RegionBusy, TransportClosed, TransportError, TransportFailed
from transport.imm import ImmediateCounters
from transport.inbox import Inbox, attempted
from transport.loopback_link import EKEYREJECTED, ENOTCONN, PROVIDER, LoopbackLink, LoopbackSource
from transport.outgoing import Outbox
from transport.transfer import TransferState

log = logging.getLogger(__name__)

_MAX_WINDOW = 4096


class LoopbackNet:
    """Where links find each other by name."""

    def __init__(self) -> None:
        self._names = itertools.count()
        self._links: dict[bytes, LoopbackLink] = {}

    def new_name(self) -> bytes:
        return f"loopback:{next(self._names)}".encode()

    def add(self, link: LoopbackLink) -> None:
        self._links[link.name] = link

    def remove(self, link: LoopbackLink) -> None:
        self._links.pop(link.name, None)

    def find(self, name: bytes) -> LoopbackLink | None:
        return self._links.get(name)


DEFAULT_NET = LoopbackNet()


class LoopbackTransport:
    """Implements `transport.api.Transport`.

    `seed` shuffles the order in which writes land (None: in order). Each write takes between `delay_s[0]` and
    `delay_s[1]` seconds. `drop` is the share of writes that complete locally and never land, as when a receiver is
    cut off after the wire has acknowledged.
    """

    def __init__(
        self,
        net: LoopbackNet | None = None,
        *,
        seed: int | None = None,
        delay_s: tuple[float, float] = (0.0, 0.0),
        drop: float = 0.0,
    ) -> None:
        self.net = net or DEFAULT_NET
        self.outbox = Outbox()
        self._random = random.Random(seed)
        self._shuffled, self._delay_s, self._drop = seed is not None, delay_s, drop
        self._event = threading.Event()
        self.inbox = Inbox(self._event.set)
        self._immediates = ImmediateCounters()
        self._links: list[LoopbackLink] = []
        self._wire: list[tuple[float, float, int, LoopbackLink, TransferState, int]] = []
        self._sequence = itertools.count()
        self._closed_now: list[threading.Event] = []
        self._stopping = self._closed = False
        self._error: TransportFailed | None = None
        self._thread = threading.Thread(target=self._run, name="transport-loopback", daemon=True)
        self._thread.start()

    @property
    def provider(self) -> str:
        return PROVIDER

    @property
    def receiver_pulls(self) -> bool:
        return False

    @property
    def immediates(self) -> ImmediateCounters:
        return self._immediates

    @property
    def error(self) -> TransportError | None:
        return self._error

    @property
    def max_window(self) -> int:
        return _MAX_WINDOW

    def register(self, memory: Memory) -> LoopbackSource:
        return LoopbackSource(memory)

    def unregister(self, region: SourceRegion) -> None:
        """Raises RegionBusy."""
        if not isinstance(region, LoopbackSource):
            raise TypeError(f"{type(region).__name__} was not made by LoopbackTransport.register")
        users = sorted(map(str, list(region.users)))
        if users:
            raise RegionBusy(f"the region is still read by {', '.join(users)}: wait for them or close their link")

    def open_link(self) -> LoopbackLink:
        """Raises TransportClosed."""
        link: LoopbackLink = self.inbox.call(self._open_link)
        return link

    def stats(self) -> dict[str, int]:
        return {
            "writes_posted": self.outbox.posted,
            "writes_completed": self.outbox.completed,
            "writes_failed": self.outbox.failed,
            "bytes_completed": self.outbox.bytes_completed,
            "immediates_late": self._immediates.late,
            "links_open": len(self._links),
        }

    def close(self) -> None:
        """Idempotent. Raises TransportError when called from a callback."""
        if self.inbox.on_worker:
            raise TransportError("a transport cannot be closed from its own callbacks")
        if not self._closed:
            self._closed = True
            with suppress(TransportClosed):  # the thread has ended by an error, or is about to
                self.inbox.send(self._stop)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def arrived(self, link: LoopbackLink, imm: Imm) -> None:
        """A payload has landed on one of this transport's links."""
        try:
            self.inbox.send(lambda: self._count(link, imm))
        except TransportClosed:
            return

    def end_link(self, link: LoopbackLink, error: TransportError | None = None) -> None:
        """Returns when the link's transfers are done and their callbacks have been called."""
        self.net.remove(link)
        closed = threading.Event()
        if self.inbox.on_worker:
            self._end_link(link, closed, error)
            return
        try:
            self.inbox.send(lambda: self._end_link(link, closed, error))
        except TransportClosed:
            return
        closed.wait()

    def _stop(self) -> None:
        self._stopping = True

    def _open_link(self) -> LoopbackLink:
        link = LoopbackLink(self, self.net.new_name())
        self.net.add(link)
        self._links.append(link)
        return link

    def _count(self, link: LoopbackLink, imm: Imm) -> None:
        if not link.closed:
            self.outbox.imms.append(np.array([imm], np.int64))

    def _end_link(self, link: LoopbackLink, closed: threading.Event, error: TransportError | None) -> None:
        link.outgoing.break_off(error or LinkClosed(f"the link to {link.peer or 'its peer'} was closed"))
        self._wire = [entry for entry in self._wire if entry[3] is not link]
        heapq.heapify(self._wire)
        link.outgoing.abandon()
        if link in self._links:
            self._links.remove(link)
        self._closed_now.append(closed)

    def _run(self) -> None:
        self.inbox.attach()
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            log.critical("the transport's worker thread failed", exc_info=True)
            self._error = TransportFailed(f"the transport's worker thread has failed, open a new transport: {error!r}")
        self._stopping = True
        for link in list(self._links):
            attempted(link.close if self._error is None else partial(link.break_down, self._error), "closing a link")
        attempted(partial(self.inbox.end, self._error), "ending a transport")
        attempted(self._call_back, "the last callbacks of a transport")

    def _turn(self) -> None:
        moved = self.inbox.take()
        for link in self._links:
            moved = self._post(link) or moved
        moved = self._land_due() or moved
        self._call_back()
        if not moved and self.inbox.begin_rest():
            due = self._wire[0][0] - time.monotonic() if self._wire else 1.0
            self._event.wait(max(due, 0.0))
            self.inbox.end_rest()
            self._event.clear()

    def _post(self, link: LoopbackLink) -> bool:
        moved = False
        while link.outgoing.in_flight < link.window and (transfer := link.outgoing.next) is not None:
            moved = True
            count = min(link.window - link.outgoing.in_flight, transfer.total - transfer.posted)
            first = transfer.posted
            link.outgoing.posted(transfer, count)
            for block in range(first, first + count):
                due = time.monotonic() + self._random.uniform(*self._delay_s) if self._delay_s[1] else 0.0
                rank = self._random.random() if self._shuffled else 0.0
                heapq.heappush(self._wire, (due, rank, next(self._sequence), link, transfer, block))
        return moved

    def _land_due(self) -> bool:
        moved = False
        now = time.monotonic()
        while self._wire and self._wire[0][0] <= now and not self._stopping:
            moved = True
            _, _, _, link, transfer, block = heapq.heappop(self._wire)
            if self._drop and self._random.random() < self._drop:
                code = 0
            else:
                target = self.net.find(link.target) if link.target is not None else None
                code = target.land(transfer.order, block) if target is not None else ENOTCONN
            if code == 0:
                link.outgoing.completed(np.array([transfer.ticket], np.int64))
            elif code > 0:
                text = "key was rejected" if code == EKEYREJECTED else "the peer is gone"
                link.outgoing.failed(transfer.ticket, PeerLost("write", code, text, PROVIDER, link.peer))
        return moved

    def _call_back(self) -> None:
        try:
            self.outbox.deliver(self._immediates)
        finally:
            for event in self._closed_now:
                event.set()
            self._closed_now.clear()
