"""`UcxLink`: what the owner of a link holds. It checks what is asked, and passes it to the worker thread."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Self

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
from transport.quiesce import quiesce
from transport.transfer import Order, TransferState, immediate_order, paged_order, single_order
from transport.ucx.calls import PROVIDER
from transport.ucx.link_end import LinkEnd
from transport.ucx.worker import Worker


@dataclass(frozen=True, slots=True)
class UcxExposure:
    """Implements `transport.api.ExposedRegion`."""

    descriptor: RegionDescriptor


class UcxLink:
    """Implements `transport.api.Link`."""

    def __init__(self, worker: Worker, end: LinkEnd, incarnation: int) -> None:
        self._worker, self._end, self._incarnation = worker, end, incarnation
        self._address = LinkAddress(DESCRIPTOR_VERSION, PROVIDER, incarnation, end.names, end.rails)
        self._peer: LinkAddress | None = None
        self._window = 0
        self._closed = False

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

    def expose(self, memory: Memory) -> UcxExposure:
        """Raises LinkClosed, FabricError, ProviderUnavailable."""
        self._check_open()
        base, keys = self._worker.expose(self._end, memory)
        return UcxExposure(
            RegionDescriptor(
                DESCRIPTOR_VERSION, PROVIDER, self._incarnation, base, memory.length_bytes, keys, memory.device
            )
        )

    def connect(self, peer: LinkAddress, *, window: int, name: str = "") -> None:
        """Raises ValueError, DescriptorMismatch, LinkClosed, FabricError. A peer that is not there fails the writes."""
        self._check_open()
        check_descriptor(peer, PROVIDER)
        if window < 0:
            raise ValueError(f"window must not be negative, not {window}")
        if len(peer.names) != 1 or len(peer.rails) != 1:
            raise DescriptorMismatch(f"the peer's address has {len(peer.names)} names, but UCX needs exactly one")
        if self._peer is not None:
            raise ValueError(f"the link is connected already, to {self._end.peer or 'a peer'}: open another one")
        self._worker.inbox.call(lambda: self._end.connect(peer, window, name))
        self._peer, self._window = peer, window

    def write_paged(self, write: PagedWrite, on_done: OnDone | None = None) -> TransferState:
        """Raises ValueError, DescriptorMismatch, NotConnected, LinkClosed."""
        return self._submit(paged_order(write, PROVIDER), write.target, on_done)

    def write(self, write: SingleWrite, on_done: OnDone | None = None) -> TransferState:
        """Raises ValueError, DescriptorMismatch, NotConnected, LinkClosed."""
        return self._submit(single_order(write, PROVIDER), write.target, on_done)

    def immediate(self, target: RegionDescriptor, imm: Imm, on_done: OnDone | None = None) -> TransferState:
        """Raises ValueError, DescriptorMismatch, NotConnected, LinkClosed."""
        return self._submit(immediate_order(target, imm, PROVIDER), target, on_done)

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

    def _submit(self, order: Order, target: RegionDescriptor, on_done: OnDone | None) -> TransferState:
        self._check_open()
        if self._peer is None:
            raise NotConnected("the link has no peer yet: connect it before writing")
        if not self._window:
            raise NotConnected("the link was connected for messages only, with a window of 0")
        check_target(target, self._peer)
        transfer = TransferState(order, on_done, self._end.peer, self._cancel)
        try:
            self._worker.inbox.send(lambda: self._end.submit(transfer))
        except TransportClosed as error:
            transfer.stop(error)
            transfer.finish()
            raise
        return transfer

    def _cancel(self, transfer: TransferState) -> None:
        with suppress(TransportClosed):  # then it is done, or about to be
            self._worker.inbox.send(lambda: self._end.outgoing.cancel(transfer))

    def _check_open(self) -> None:
        if self._closed:
            raise LinkClosed(f"the link to {self._end.peer or 'its peer'} is closed")
