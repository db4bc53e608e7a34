"""A link of the fault layer: it holds back, reorders and loses what goes out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self

from transport.api import (
    MAX_MESSAGE_BYTES,
    ExposedRegion,
    Imm,
    Link,
    LinkAddress,
    Memory,
    OnDone,
    OnMessage,
    PagedWrite,
    RegionDescriptor,
    SingleWrite,
    Transfer,
)
from transport.descriptors import check_target
from transport.errors import FabricError, LinkClosed, MessageTooLarge, NotConnected, TransportError
from transport.faulty_transfer import FaultyTransfer
from transport.transfer import immediate_order, paged_order, single_order

if TYPE_CHECKING:
    from transport.faults import FaultyTransport

EIO = 5


@dataclass(frozen=True, slots=True)
class Piece:
    """What is handed on at once: `post` submits it to the link below."""

    length_bytes: int
    post: Callable[[OnDone], Transfer]


class FaultyLink:
    """Implements `transport.api.Link` around another one; see `transport.fault_plan.FaultPlan` for what it does.

    Two faults are begun by hand: `go_silent` and `partition`.
    """

    def __init__(self, home: FaultyTransport, on_message: OnMessage | None) -> None:
        self._home = home
        self._on_message = on_message
        self._inner: Link = home.inner.open_link(self._heard if on_message is not None else None)
        self._peer: LinkAddress | None = None
        self._name, self._window = "", 0
        self._posting = threading.RLock()  # re-entered where a write completes within its submission
        self._closed = False
        self._error: TransportError | None = None
        self._transfers: set[FaultyTransfer] = set()
        self._last_due = 0.0
        self.silent = False
        self.partitioned = False

    @property
    def address(self) -> LinkAddress:
        return self._inner.address

    @property
    def in_flight(self) -> int:
        return self._inner.in_flight

    @property
    def posted(self) -> int:
        return self._inner.posted

    @property
    def error(self) -> Exception | None:
        return self._error or self._inner.error

    @property
    def lost_paths(self) -> tuple[str, ...]:
        return self._inner.lost_paths

    @property
    def revoked(self) -> bool:
        return self._inner.revoked

    @property
    def transfers(self) -> list[FaultyTransfer]:
        """Those that are not done."""
        with self._posting:
            return list(self._transfers)

    def go_silent(self) -> None:
        """Plays a peer that was killed where nothing reports it: what is held back stays so, messages are lost.

        What was handed on before still completes.
        """
        self.silent = True

    def partition(self, on: bool = True) -> None:
        """Messages are lost both ways while writes go on: a peer that is out of reach and does not know it."""
        self.partitioned = on

    def expose(self, memory: Memory) -> ExposedRegion:
        return self._inner.expose(memory)

    def connect(self, peer: LinkAddress, *, window: int, name: str = "") -> None:
        self._inner.connect(peer, window=window, name=name)
        self._peer, self._window, self._name = peer, window, name

    def write_paged(self, write: PagedWrite, on_done: OnDone | None = None) -> FaultyTransfer:
        order = paged_order(write, self._home.provider)
        pieces = []
        for cut in self._home.dice.pieces(len(order.source_index)):
            part = replace(write, source_index=order.source_index[cut], target_index=order.target_index[cut])
            length = len(part.source_index) * write.block_bytes
            pieces.append(Piece(length, partial(self._inner.write_paged, part)))
        transfer = FaultyTransfer(write.source, len(order.source_index), len(pieces), self._name)
        return self._submit(write.target, pieces, transfer, on_done)

    def write(self, write: SingleWrite, on_done: OnDone | None = None) -> FaultyTransfer:
        order = single_order(write, self._home.provider)
        piece = Piece(write.length_bytes, partial(self._inner.write, write))
        transfer = FaultyTransfer(write.source, len(order.source_index), 1, self._name)
        return self._submit(write.target, [piece], transfer, on_done)

    def immediate(self, target: RegionDescriptor, imm: Imm, on_done: OnDone | None = None) -> FaultyTransfer:
        immediate_order(target, imm, self._home.provider)
        piece = Piece(0, partial(self._inner.immediate, target, imm))
        return self._submit(target, [piece], FaultyTransfer(None, 1, 1, self._name), on_done)

    def send(self, message: bytes) -> None:
        self._check_open()
        if self._peer is None:
            raise NotConnected("the link has no peer yet: connect it before sending")
        if len(message) > MAX_MESSAGE_BYTES:
            raise MessageTooLarge(f"a message of {len(message)} bytes is above {MAX_MESSAGE_BYTES}: use a write")
        taken = bytes(message)
        for after_s in self._home.dice.message().copies_s:
            if after_s:
                self._home.schedule.at(time.monotonic() + after_s, self, partial(self._send_late, taken))
            elif not self.silent and not self.partitioned:
                self._inner.send(taken)

    def quiesce(self, timeout_s: float | None = None) -> int:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def left_s() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        while left := self.transfers:
            for transfer in left:
                if not transfer.wait(left_s()):
                    names = ", ".join(str(transfer) for transfer in left if not transfer.done)
                    raise TimeoutError(f"after {timeout_s} s the link still writes: {names}")
        return self._inner.quiesce(left_s())

    def close(self) -> None:
        with self._posting:
            self._closed = True
        self._home.schedule.forget(self)
        self._inner.close()
        for transfer in self.transfers:
            transfer.stop(LinkClosed(f"{transfer} was held back when its link was closed"))
        self._home.forget(self)

    def _submit(
        self, target: RegionDescriptor, pieces: list[Piece], transfer: FaultyTransfer, on_done: OnDone | None
    ) -> FaultyTransfer:
        self._check_open()
        if self._peer is None:
            raise NotConnected("the link has no peer yet: connect it before writing")
        if not self._window:
            raise NotConnected(f"the link to {self._name or 'its peer'} was connected for messages only, with window 0")
        check_target(target, self._peer)
        self._home.check_open()
        transfer.on_done, transfer.on_finished = on_done, self._finished
        with self._posting:
            self._transfers.add(transfer)
        if self._error is not None:
            transfer.stop(self._error)
            return transfer
        for piece in pieces:
            due = self._home.dice.due(piece.length_bytes)
            if not self._home.plan.reorder:
                due = self._last_due = max(due, self._last_due)
            step = self._fail if self._home.dice.fails() else self._post
            self._home.schedule.at(due, self, partial(step, transfer, piece))
        return transfer

    def _post(self, transfer: FaultyTransfer, piece: Piece) -> None:
        if self.silent:
            return
        with self._posting:
            if self._closed or not transfer.take():
                return
            try:
                transfer.handed(piece.post(transfer.ended))
            except TransportError as error:
                transfer.refused(error)

    def _fail(self, transfer: FaultyTransfer, piece: Piece) -> None:
        if self.silent:
            return
        call, text = "fi_writedata", "the provider refused it (a fault of the plan)"
        self._error = self._error or FabricError(call, EIO, text, self._home.provider, self._name)
        for each in self.transfers:
            each.stop(self._error)

    def _send_late(self, message: bytes) -> None:
        if not self.silent and not self.partitioned:
            with suppress(TransportError):  # nobody is there to be told
                self._inner.send(message)

    def _heard(self, message: bytes) -> None:
        if self._on_message is not None and not self.silent and not self.partitioned:
            self._on_message(message)

    def _finished(self, transfer: FaultyTransfer) -> None:
        with self._posting:
            self._transfers.discard(transfer)

    def _check_open(self) -> None:
        if self._closed:
            raise LinkClosed(f"the link to {self._name or 'its peer'} is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
