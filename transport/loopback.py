"""`LoopbackTransport`: the transport inside one process, for tests and experiments.

It keeps what a caller may rely on (see `transport.api`) and uses every freedom that a fabric has: writes land in any
order, late, and complete locally before or after they land; a NIC that dies leaves it open which of its writes landed.
Transports that share a `LoopbackNet` reach each other.
"""

from __future__ import annotations

import logging
import secrets
import threading
from contextlib import suppress
from functools import partial
from typing import Self

from transport.api import Memory, OnMessage, SourceRegion
from transport.descriptors import LinkAddress
from transport.errors import ProviderUnavailable, TransportClosed, TransportError, TransportFailed
from transport.imm import ImmediateCounters
from transport.inbox import Inbox, attempted
from transport.loopback_link import PROVIDER, LoopbackLink, LoopbackSource, check_host
from transport.loopback_net import DEFAULT_NET, LoopbackNet
from transport.loopback_wire import Wire
from transport.loopback_worker import Arrival, LoopbackWorker
from transport.transfer import retire

__all__ = ["DEFAULT_NET", "LoopbackNet", "LoopbackTransport"]

log = logging.getLogger(__name__)

_MAX_WINDOW = 4096


class LoopbackTransport:
    """Implements `transport.api.Transport`.

    It has `nics` NICs, whose rails are their indices. `seed` shuffles the order in which writes land (None: in order).
    Each write takes between `delay_s[0]` and `delay_s[1]` seconds. `drop` is the share of writes that complete locally
    and never land, as when a receiver is cut off after the wire has acknowledged. Without `revokes`, a write that was
    under way when its receiver closed the link may land afterwards: for code that must cope with such a provider.
    """

    def __init__(
        self,
        net: LoopbackNet | None = None,
        *,
        nics: int = 1,
        seed: int | None = None,
        delay_s: tuple[float, float] = (0.0, 0.0),
        drop: float = 0.0,
        revokes: bool = True,
    ) -> None:
        if nics < 1:
            raise ValueError(f"a transport needs a NIC, not {nics}")
        self.net = net or DEFAULT_NET
        self.incarnation = secrets.randbits(64)
        self.revokes = revokes
        self._nics = nics
        self._event = threading.Event()
        self.inbox = Inbox(self._event.set)
        self._immediates = ImmediateCounters()
        self._worker = LoopbackWorker(self.net, Wire(seed, delay_s, drop))
        self.outbox = self._worker.outbox
        self._stopping = self._closed = False
        self._error: TransportFailed | None = None
        self._thread = threading.Thread(target=self._run, name="transport-loopback", daemon=True)
        self._thread.start()

    @property
    def provider(self) -> str:
        return PROVIDER

    @property
    def description(self) -> str:
        return f"loopback inside this process, over {self._nics} NIC{'s' if self._nics > 1 else ''} of its own"

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
        """Raises ProviderUnavailable."""
        check_host(memory)
        return LoopbackSource(memory)

    def unregister(self, region: SourceRegion) -> None:
        """Raises RegionBusy."""
        if not isinstance(region, LoopbackSource):
            raise TypeError(f"{type(region).__name__} was not made by LoopbackTransport.register")
        self.inbox.call(lambda: retire(region))

    def open_link(self, on_message: OnMessage | None = None) -> LoopbackLink:
        """Raises TransportClosed; ProviderUnavailable when every NIC has failed."""
        link: LoopbackLink = self.inbox.call(lambda: self._open_link(on_message))
        return link

    def fail_nic(self, nic: int) -> None:
        """Plays a NIC that dies on this side: its paths break, and links that are opened later do without it."""
        if not 0 <= nic < self._nics:
            raise ValueError(f"there is no NIC {nic} among {self._nics}")
        self.inbox.call(lambda: self._worker.fail_nic(nic))

    def stats(self) -> dict[str, int]:
        return {
            "writes_posted": self.outbox.posted,
            "writes_completed": self.outbox.completed,
            "writes_failed": self.outbox.failed,
            "bytes_completed": self.outbox.bytes_completed,
            "immediates_late": self._immediates.late,
            "messages_sent": self.outbox.messages_sent,
            "messages_received": self.outbox.messages_received,
            "paths_lost": self.outbox.paths_lost,
            "links_open": len(self._worker.links),
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

    def deliver(self, arrival: Arrival) -> None:
        """Something has arrived at one of this transport's links. From any thread."""
        self._worker.arrivals.append(arrival)
        self.inbox.nudge()

    def make_paths(self, link: LoopbackLink, peer: LinkAddress) -> None:
        self._worker.make_paths(link, peer)

    def send(self, link: LoopbackLink, message: bytes) -> None:
        link.flow.submit(message)
        self.outbox.messages_sent += 1

    def end_link(self, link: LoopbackLink, error: TransportError | None = None) -> None:
        """Returns when the link's transfers are done and their callbacks have been called."""
        if self.revokes:
            for name in link.address.names:
                self.net.remove(name)
        ended = threading.Event()
        if self.inbox.on_worker:
            self._worker.end_link(link, ended, error)
            return
        try:
            self.inbox.send(lambda: self._worker.end_link(link, ended, error))
        except TransportClosed:
            return
        ended.wait()

    def _stop(self) -> None:
        self._stopping = True

    def _open_link(self, on_message: OnMessage | None) -> LoopbackLink:
        rails = tuple(nic for nic in range(self._nics) if nic not in self._worker.failed_nics)
        if not rails:
            raise ProviderUnavailable("every NIC of this transport has failed: open a new transport")
        link = LoopbackLink(self, tuple(self.net.new_name() for _ in rails), rails, on_message)
        self.net.add(link)
        self._worker.links.append(link)
        return link

    def _run(self) -> None:
        self.inbox.attach()
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            log.critical("the transport's worker thread failed", exc_info=True)
            self._error = TransportFailed(f"the transport's worker thread has failed, open a new transport: {error!r}")
        self._stopping = True
        for link in list(self._worker.links):
            attempted(link.close if self._error is None else partial(link.break_down, self._error), "closing a link")
        attempted(partial(self.inbox.end, self._error), "ending a transport")
        attempted(self._call_back, "the last callbacks of a transport")

    def _turn(self) -> None:
        moved = self.inbox.take()
        moved = self._worker.turn() or moved
        self._call_back()
        if not moved and self.inbox.begin_rest():
            if not self._worker.arrivals:
                self._event.wait(self._worker.wire.due_s)
            self.inbox.end_rest()
            self._event.clear()

    def _call_back(self) -> None:
        try:
            self.outbox.deliver(self._immediates)
        finally:
            for event in self._worker.ended:
                event.set()
            self._worker.ended.clear()
