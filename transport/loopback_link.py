"""The links of the in-process transport: how a write lands, and when it no longer can."""

from __future__ import annotations

import ctypes
import secrets
import threading
from contextlib import suppress
from typing import Protocol, Self

from transport.api import (
    DESCRIPTOR_VERSION,
    Imm,
    LinkAddress,
    Memory,
    OnDone,
    PagedWrite,
    RegionDescriptor,
    SingleWrite,
)
from transport.errors import LinkClosed, NotConnected, TransportClosed, TransportError
from transport.inbox import Inbox
from transport.outgoing import Outbox, Outgoing
from transport.transfer import Order, TransferState, check_descriptor, immediate_order, paged_order, single_order

PROVIDER = "loopback"
ENOTCONN, EKEYREJECTED = 107, 129


class Home(Protocol):
    """What a link needs of its transport."""

    inbox: Inbox
    outbox: Outbox

    def arrived(self, link: LoopbackLink, imm: Imm) -> None: ...
    def end_link(self, link: LoopbackLink, error: TransportError | None = None) -> None: ...


class LoopbackSource:
    """Implements `transport.api.SourceRegion`."""

    desc = 0

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.users: set[TransferState] = set()


class LoopbackExposure:
    """Implements `transport.api.ExposedRegion`."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        key = secrets.randbits(63)
        self.descriptor = RegionDescriptor(DESCRIPTOR_VERSION, PROVIDER, 0, memory.length_bytes, key)


class LoopbackLink:
    """Implements `transport.api.Link`."""

    def __init__(self, home: Home, name: bytes) -> None:
        self._home = home
        self.name = name
        self._exposed: dict[int, LoopbackExposure] = {}
        self._landing = threading.Lock()
        self.closed = False
        """Nothing lands any more: its owner has closed it, or it has broken down."""
        self._closed_by_owner = False
        self.silent = False
        self.target: bytes | None = None
        self.peer = ""
        self.window = 0
        self.outgoing = Outgoing(home.outbox)

    @property
    def address(self) -> LinkAddress:
        return LinkAddress(DESCRIPTOR_VERSION, PROVIDER, self.name)

    @property
    def in_flight(self) -> int:
        return self.outgoing.in_flight

    @property
    def error(self) -> TransportError | None:
        return self.outgoing.error

    def expose(self, memory: Memory) -> LoopbackExposure:
        self._check_open()
        if self.closed:
            raise LinkClosed(f"the link to {self.peer or 'its peer'} is broken: {self.error}")
        exposure = LoopbackExposure(memory)
        with self._landing:
            self._exposed[exposure.descriptor.key] = exposure
        return exposure

    def connect(self, peer: LinkAddress, *, window: int, name: str = "") -> None:
        self._check_open()
        check_descriptor(peer, PROVIDER)
        if window < 1:
            raise ValueError(f"window must be at least 1, not {window}")
        if self.target is not None:
            raise ValueError(f"the link is connected already, to {self.peer or 'a peer'}: open another one")
        self.target, self.window, self.peer = peer.name, window, name

    def write_paged(self, write: PagedWrite, on_done: OnDone | None = None) -> TransferState:
        return self._submit(paged_order(write, PROVIDER), on_done)

    def write(self, write: SingleWrite, on_done: OnDone | None = None) -> TransferState:
        return self._submit(single_order(write, PROVIDER), on_done)

    def immediate(self, target: RegionDescriptor, imm: Imm, on_done: OnDone | None = None) -> TransferState:
        return self._submit(immediate_order(target, imm, PROVIDER), on_done)

    def close(self) -> None:
        self._closed_by_owner = True
        self._end()

    def break_down(self, error: TransportError) -> None:
        """Plays a link that fails on this side, as by its completion queue: `error` stays with it."""
        self._end(error)

    def _end(self, error: TransportError | None = None) -> None:
        self.closed = True
        with self._landing:
            self._exposed.clear()
        self._home.end_link(self, error)

    def go_silent(self) -> None:
        """Plays a process that was killed where the wire does not report it: nothing lands, nothing completes."""
        self.silent = True

    def land(self, order: Order, block: int) -> int:
        """A peer's write arrives. Returns 0, or the error number that the peer sees; -1 if it sees nothing ever."""
        with self._landing:
            if self.silent:
                return -1
            if self.closed:
                return ENOTCONN
            exposure = self._exposed.get(order.key)
            start = order.target + order.target_stride * int(order.target_index[block])
            if exposure is None or not 0 <= start <= start + order.block_bytes <= exposure.memory.length_bytes:
                return EKEYREJECTED
            source = order.source + order.source_stride * int(order.source_index[block])
            ctypes.memmove(exposure.memory.address + start, source, order.block_bytes)
        self._home.arrived(self, order.imm)
        return 0

    def _submit(self, order: Order, on_done: OnDone | None) -> TransferState:
        self._check_open()
        if self.target is None:
            raise NotConnected("the link has no peer yet: connect it before writing")
        transfer = TransferState(order, on_done, self.peer, self._cancel)
        try:
            self._home.inbox.send(lambda: self.outgoing.submit(transfer))
        except TransportClosed as error:
            transfer.stop(error)
            transfer.finish()
            raise
        return transfer

    def _cancel(self, transfer: TransferState) -> None:
        with suppress(TransportClosed):  # then it is done, or about to be
            self._home.inbox.send(lambda: self.outgoing.cancel(transfer))

    def _check_open(self) -> None:
        if self._closed_by_owner:
            raise LinkClosed(f"the link to {self.peer or 'its peer'} is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
