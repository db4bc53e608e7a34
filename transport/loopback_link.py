"""The links of the in-process transport: how a write lands, and when it no longer can."""

from __future__ import annotations

import secrets
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from transport.api import (
    DESCRIPTOR_VERSION,
    Imm,
    LinkAddress,
    Memory,
    OnDone,
    OnMessage,
    PagedWrite,
    RegionDescriptor,
    SingleWrite,
)
from transport.descriptors import check_descriptor, check_target
from transport.errors import LinkClosed, NotConnected, ProviderUnavailable, TransportClosed, TransportError
from transport.loopback_copy import bind_copy
from transport.messages import MessageFlow
from transport.outgoing import Outgoing, Path
from transport.quiesce import quiesce
from transport.transfer import Order, TransferState, immediate_order, paged_order, single_order

if TYPE_CHECKING:
    from transport.loopback import LoopbackTransport

PROVIDER = "loopback"
EIO, ENOTCONN, EKEYREJECTED = 5, 107, 129


def check_host(memory: Memory) -> None:
    """Raises ProviderUnavailable."""
    if memory.device.kind != "host":
        raise ProviderUnavailable(
            f"provider {PROVIDER!r} moves host memory only, not that of {memory.device}: copy it to the host first"
        )


class LoopbackSource:
    """Implements `transport.api.SourceRegion`."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.users: set[TransferState] = set()
        self.retired = False


class LoopbackExposure:
    """Implements `transport.api.ExposedRegion`."""

    def __init__(self, memory: Memory, incarnation: int, keys: int) -> None:
        self.memory = memory
        self.descriptor = RegionDescriptor(
            DESCRIPTOR_VERSION, PROVIDER, incarnation, 0, memory.length_bytes,
            tuple(secrets.token_bytes(8) for _ in range(keys)),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Landing:
    """Blocks of one order that arrive at the NIC `lane` of a link."""

    order: Order
    lane: int
    block_bytes: int
    blocks: slice | NDArray[np.int64] | None


class LoopbackLink:
    """Implements `transport.api.Link`. `rails` are the transport's NICs that it uses, each with one of `names`."""

    def __init__(
        self, home: LoopbackTransport, names: tuple[bytes, ...], rails: tuple[int, ...], on_message: OnMessage | None
    ) -> None:
        self.home = home
        self.on_message = on_message
        self.address = LinkAddress(DESCRIPTOR_VERSION, PROVIDER, home.incarnation, names, rails)
        self._exposed: list[LoopbackExposure] = []
        self._landing = threading.Lock()
        self.closed = False
        """Nothing lands any more: its owner has closed it, or it has broken down."""
        self._closed_by_owner = False
        self.silent = False
        self.dead_lanes: set[int] = set()
        self.target: LinkAddress | None = None
        self.peer = ""
        self.window = 0
        self.paths: list[Path] = []
        self.outgoing = Outgoing(home.outbox)
        self.flow = MessageFlow()

    @property
    def in_flight(self) -> int:
        return self.outgoing.in_flight

    @property
    def posted(self) -> int:
        return self.outgoing.posted_total

    @property
    def error(self) -> TransportError | None:
        return self.outgoing.error

    @property
    def revoked(self) -> bool:
        return self.closed

    @property
    def lost_paths(self) -> tuple[str, ...]:
        return tuple(
            f"NIC {self.address.rails[path.pair[0]]} here to NIC {path.pair[1]} there: {path.broken}"
            for path in self.outgoing.lost
        )

    @property
    def message_path(self) -> Path | None:
        """The first that is left."""
        return next((path for path in self.paths if path.broken is None), None)

    def room(self, lane: int) -> int:
        """How many writes may be posted through a NIC now: the window is divided over them."""
        busy = sum(path.in_flight for path in self.paths if path.pair[0] == lane)
        share = max(1, self.window // len(self.address.names))
        return min(share - busy, self.window - self.in_flight)

    def expose(self, memory: Memory) -> LoopbackExposure:
        """Raises LinkClosed, ProviderUnavailable."""
        self._check_open()
        check_host(memory)
        if self.closed:
            raise LinkClosed(f"the link to {self.peer or 'its peer'} is broken: {self.error}")
        exposure = LoopbackExposure(memory, self.address.incarnation, len(self.address.names))
        with self._landing:
            self._exposed.append(exposure)
        return exposure

    def connect(self, peer: LinkAddress, *, window: int, name: str = "") -> None:
        """Raises ValueError, DescriptorMismatch, LinkClosed."""
        self._check_open()
        check_descriptor(peer, PROVIDER)
        if window < 0:
            raise ValueError(f"window must not be negative, but is {window}; 0 is for messages only")
        if self.target is not None:
            raise ValueError(f"the link is connected already, to {self.peer or 'a peer'}: open another one")
        self.target, self.window, self.peer = peer, window, name
        with suppress(TransportClosed):
            self.home.inbox.call(lambda: self.home.make_paths(self, peer))

    def write_paged(self, write: PagedWrite, on_done: OnDone | None = None) -> TransferState:
        return self._submit(paged_order(write, PROVIDER), write.target, on_done)

    def write(self, write: SingleWrite, on_done: OnDone | None = None) -> TransferState:
        return self._submit(single_order(write, PROVIDER), write.target, on_done)

    def immediate(self, target: RegionDescriptor, imm: Imm, on_done: OnDone | None = None) -> TransferState:
        return self._submit(immediate_order(target, imm, PROVIDER), target, on_done)

    def send(self, message: bytes) -> None:
        """Raises MessageTooLarge, BacklogFull, NotConnected, LinkClosed. A broken link drops it."""
        self._check_open()
        if self.target is None:
            raise NotConnected("the link has no peer yet: connect it before sending")
        if self.error is not None:
            raise LinkClosed(f"the link to {self.peer or 'its peer'} is broken: {self.error}")
        taken = bytes(message)
        self.flow.check(taken)
        self.home.inbox.send(lambda: self.home.send(self, taken))

    def quiesce(self, timeout_s: float | None = None) -> int:
        return quiesce(self.home.inbox, self.outgoing, timeout_s)

    def close(self) -> None:
        self._closed_by_owner = True
        self._end()

    def break_down(self, error: TransportError) -> None:
        """Plays a link that fails on this side, as by its completion queue: `error` stays with it."""
        self._end(error)

    def go_silent(self) -> None:
        """Plays a process that was killed where the wire does not report it: nothing lands, nothing completes."""
        self.silent = True

    def hand_over(self, message: bytes) -> None:
        """The callback of an earlier message may have closed the link."""
        if self.on_message is not None and not self.closed:
            self.on_message(message)

    def land(self, landing: Landing) -> tuple[int, int]:
        """A peer's writes arrive. Returns how many landed, and the error number that the peer sees for the next one.

        That number is 0 if all landed, and -1 if the peer never sees anything.
        """
        order, blocks = landing.order, landing.blocks
        with self._landing:
            if self.silent:
                return 0, -1
            if self.closed and self.home.revokes:
                return 0, ENOTCONN
            exposure = self._keyed(landing.lane, order.keys[landing.lane])
            if exposure is None:
                return 0, EKEYREJECTED
            first, length = exposure.memory.address, exposure.memory.length_bytes
            index = order.source_index[blocks], order.target_index[blocks]
            count = bind_copy()(
                landing.block_bytes, order.source, order.source_stride, index[0],
                first + order.target, order.target_stride, index[1], first, first + length,
            )  # fmt: skip
            if self.closed:  # the transport does not revoke: bytes land, but nobody is told
                return 0, ENOTCONN
        return count, 0 if count == len(index[0]) else EKEYREJECTED

    def _keyed(self, lane: int, key: bytes) -> LoopbackExposure | None:
        return next((each for each in self._exposed if each.descriptor.keys[lane] == key), None)

    def _end(self, error: TransportError | None = None) -> None:
        self.closed = True
        with self._landing:
            if self.home.revokes:
                self._exposed.clear()
        self.home.end_link(self, error)

    def _submit(self, order: Order, target: RegionDescriptor, on_done: OnDone | None) -> TransferState:
        self._check_open()
        if self.target is None:
            raise NotConnected("the link has no peer yet: connect it before writing")
        if not self.window:
            raise NotConnected(f"the link to {self.peer or 'its peer'} was connected for messages only, with window 0")
        check_target(target, self.target)
        transfer = TransferState(order, on_done, self.peer, self._cancel)
        try:
            self.home.inbox.send(lambda: self.outgoing.submit(transfer))
        except TransportClosed as error:
            transfer.stop(error)
            transfer.finish()
            raise
        return transfer

    def _cancel(self, transfer: TransferState) -> None:
        with suppress(TransportClosed):  # then it is done, or about to be
            self.home.inbox.send(lambda: self.outgoing.cancel(transfer))

    def _check_open(self) -> None:
        if self._closed_by_owner:
            raise LinkClosed(f"the link to {self.peer or 'its peer'} is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
