"""`OwnedLink`: what the owner of a link holds, whatever library is beneath. It checks; the worker thread does."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from transport import worker
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
from transport.descriptors import check_descriptor, check_target
from transport.errors import DescriptorMismatch, LinkClosed, NotConnected, TransportClosed, TransportError
from transport.messages import MessageFlow
from transport.outgoing import Outgoing
from transport.quiesce import quiesce
from transport.transfer import Order, TransferState, immediate_order, paged_order, single_order


class LinkEnd(worker.LinkEnd, Protocol):
    """The worker's side of a link, as far as its owner's side needs it."""

    @property
    def names(self) -> tuple[bytes, ...]: ...
    @property
    def rails(self) -> tuple[int, ...]: ...
    @property
    def doorbell(self) -> bytes: ...
    @property
    def outgoing(self) -> Outgoing: ...
    @property
    def flow(self) -> MessageFlow: ...
    @property
    def error(self) -> TransportError | None: ...
    @property
    def lost_paths(self) -> tuple[str, ...]: ...
    @property
    def revoked(self) -> bool: ...
    @property
    def max_write_bytes(self) -> int:
        """A longer write must be cut."""
        ...

    def connect(self, peer: LinkAddress, window: int, name: str) -> None: ...
    def cancel(self, transfer: TransferState) -> None: ...
    def send(self, message: bytes) -> None: ...


class Identity(NamedTuple):
    """What a transport says of itself in every address and descriptor."""

    provider: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Exposure:
    """Implements `transport.api.ExposedRegion`."""

    descriptor: RegionDescriptor


E = TypeVar("E", bound=LinkEnd)


class OwnedLink(Generic[E]):
    """Implements `transport.api.Link`."""

    def __init__(self, owner: worker.Worker[E], end: E, identity: Identity) -> None:
        self._worker, self._end, self._identity = owner, end, identity
        self._address = LinkAddress(
            DESCRIPTOR_VERSION, identity.provider, identity.incarnation, end.names, end.rails, end.doorbell
        )
        self._peer: LinkAddress | None = None
        self._window = 0
        self._closed = False
        # The same request again (a flag, a ping) is not checked again: requests cannot change.
        self._last: tuple[SingleWrite, Order] | None = None

    @property
    def address(self) -> LinkAddress:
        return self._address

    @property
    def in_flight(self) -> int:
        return self._end.outgoing.in_flight

    @property
    def posted(self) -> int:
        return self._end.outgoing.posted_total

    @property
    def error(self) -> TransportError | None:
        return self._end.error

    @property
    def lost_paths(self) -> tuple[str, ...]:
        return self._end.lost_paths

    @property
    def revoked(self) -> bool:
        return self._end.revoked

    def expose(self, memory: Memory) -> Exposure:
        """Raises LinkClosed, FabricError, ProviderUnavailable (the provider does not take such memory)."""
        self._check_open()
        base, keys = self._worker.expose(self._end, memory)
        provider, incarnation = self._identity
        return Exposure(
            RegionDescriptor(DESCRIPTOR_VERSION, provider, incarnation, base, memory.length_bytes, keys, memory.device)
        )

    def connect(self, peer: LinkAddress, *, window: int, name: str = "") -> None:
        """Raises ValueError, DescriptorMismatch, LinkClosed, FabricError. A peer that is not there fails the writes."""
        self._check_open()
        check_descriptor(peer, self._identity.provider)
        if window < 0:
            raise ValueError(f"window must not be negative, but is {window}; 0 is for messages only")
        if not peer.names or len(peer.names) != len(peer.rails):
            raise DescriptorMismatch(f"the peer's address has {len(peer.names)} names and {len(peer.rails)} rails")
        if self._peer is not None:
            raise ValueError(f"the link is connected already, to {self._end.peer or 'a peer'}: open another one")
        self._worker.inbox.call(lambda: self._end.connect(peer, window, name))
        self._peer, self._window = peer, window

    def write_paged(self, write: PagedWrite, on_done: OnDone | None = None) -> TransferState:
        """Raises ValueError, DescriptorMismatch, NotConnected, LinkClosed."""
        return self._submit(paged_order(write, self._identity.provider), write.target, on_done)

    def write(self, write: SingleWrite, on_done: OnDone | None = None) -> TransferState:
        """Raises ValueError, DescriptorMismatch, NotConnected, LinkClosed."""
        last = self._last
        if last is not None and write is last[0]:
            return self._submit(last[1], None, on_done)
        order = single_order(write, self._identity.provider)
        transfer = self._submit(order, write.target, on_done)
        self._last = write, order
        return transfer

    def immediate(self, target: RegionDescriptor, imm: Imm, on_done: OnDone | None = None) -> TransferState:
        """Raises ValueError, DescriptorMismatch, NotConnected, LinkClosed."""
        return self._submit(immediate_order(target, imm, self._identity.provider), target, on_done)

    def send(self, message: bytes) -> None:
        """Raises MessageTooLarge, BacklogFull, NotConnected, LinkClosed."""
        self._check_open()
        if self._peer is None:
            raise NotConnected("the link has no peer yet: connect it before sending")
        if self.error is not None:
            raise LinkClosed(f"the link to {self._end.peer or 'its peer'} is broken: {self.error}")
        taken = bytes(message)
        self._end.flow.check(taken)
        self._worker.inbox.send(lambda: self._end.send(taken))

    def quiesce(self, timeout_s: float | None = None) -> int:
        """Raises TimeoutError, naming what is not done; TransportClosed."""
        return quiesce(self._worker.inbox, self._end.outgoing, timeout_s)

    def close(self) -> None:
        self._closed = True
        self._worker.close_end(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, order: Order, target: RegionDescriptor | None, on_done: OnDone | None) -> TransferState:
        """`target` None: it was checked."""
        if self._closed:
            self._check_open()
        if target is not None:
            self._check(order, target)
        transfer = TransferState(order, on_done, self._end.peer, self._cancel)
        try:
            self._worker.submit(self._end, transfer)
        except TransportClosed as error:
            transfer.stop(error)
            transfer.finish()
            raise
        return transfer

    def _check(self, order: Order, target: RegionDescriptor) -> None:
        if self._peer is None:
            raise NotConnected("the link has no peer yet: connect it before writing")
        if not self._window:
            raise NotConnected("the link was connected for messages only, with a window of 0")
        check_target(target, self._peer)
        if order.block_bytes > self._end.max_write_bytes:
            raise ValueError(
                f"a write of {order.block_bytes} bytes is longer than the {self._end.max_write_bytes} that the NIC "
                "takes: use more `parts`, or smaller blocks"
            )

    def _cancel(self, transfer: TransferState) -> None:
        with suppress(TransportClosed):  # then it is done, or about to be
            self._worker.inbox.send(lambda: self._end.cancel(transfer))

    def _check_open(self) -> None:
        if self._closed:
            raise LinkClosed(f"the link to {self._end.peer or 'its peer'} is closed")
