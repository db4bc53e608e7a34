"""The transfers of one link: which wait, which are outstanding, when each is done. No provider, no threads."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from transport.errors import LinkClosed, TransportError
from transport.imm import ImmediateCounters
from transport.inbox import guarded
from transport.transfer import TransferState


@dataclass(slots=True)
class Outbox:
    """What the links of a transport have for its worker to deliver, and the counters of `Transport.stats`."""

    finished: deque[TransferState] = field(default_factory=deque)
    imms: deque[NDArray[np.int64]] = field(default_factory=deque)
    posted: int = 0
    completed: int = 0
    failed: int = 0
    bytes_completed: int = 0

    def deliver(self, counters: ImmediateCounters) -> None:
        """Counts the immediates and calls what is due: full counters first, then finished transfers."""
        while self.imms or self.finished:
            while self.imms:
                for on_full, imm in counters.count(self.imms.popleft()):
                    guarded(on_full, imm)
            while self.finished:
                transfer = self.finished.popleft()
                if transfer.on_done is not None:
                    guarded(transfer.on_done, transfer)


class Outgoing:
    """First in, first posted. Used by the worker alone; finished transfers go to the outbox, never called back here."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._pending: deque[TransferState] = deque()
        self._outstanding: dict[int, TransferState] = {}
        self.broken: TransportError | None = None
        self.in_flight = 0

    @property
    def error(self) -> TransportError | None:
        """What broke the link; being closed by its owner is no breakage."""
        return None if isinstance(self.broken, LinkClosed) else self.broken

    @property
    def busy(self) -> bool:
        return self.in_flight > 0 or bool(self._pending)

    @property
    def next(self) -> TransferState | None:
        """The transfer whose writes are to be posted now."""
        return self._pending[0] if self._pending else None

    def submit(self, transfer: TransferState) -> None:
        if self.broken is not None:
            transfer.stop(self.broken)
        if transfer.stopped or not transfer.total:
            self._finish(transfer)
        else:
            self._pending.append(transfer)

    def posted(self, transfer: TransferState, count: int) -> None:
        """`count` more writes of the next transfer are in flight."""
        if count:
            self._outstanding[transfer.ticket] = transfer
            transfer.posted += count
            self.in_flight += count
            self._outbox.posted += count
        if transfer.posted == transfer.total:
            self._pending.popleft()

    def completed(self, tickets: NDArray[np.int64]) -> None:
        """One write of each ticket has completed."""
        if len(self._outstanding) == 1:
            pairs = [(next(iter(self._outstanding)), len(tickets))]
        else:
            distinct, counts = np.unique(tickets, return_counts=True)
            pairs = list(zip(distinct.tolist(), counts.tolist(), strict=True))
        for ticket, count in pairs:
            transfer = self._outstanding[ticket]
            self.in_flight -= count
            transfer.completed += count
            self._outbox.completed += count
            self._outbox.bytes_completed += count * transfer.order.block_bytes
            self._settle(transfer)

    def failed(self, ticket: int, error: TransportError) -> None:
        """One write has failed. That ends the link: providers tear the connection down with it."""
        transfer = self._outstanding[ticket]
        self.in_flight -= 1
        transfer.failed += 1
        self._outbox.failed += 1
        transfer.stop(error)
        self.break_off(error)
        self._settle(transfer)

    def cancel(self, transfer: TransferState) -> None:
        if transfer.done:
            return
        transfer.stop(transfer.cancelled())
        if transfer in self._pending:
            self._pending.remove(transfer)
        self._settle(transfer)

    def break_off(self, error: TransportError) -> None:
        """Nothing more is posted. What is in flight stays so until it completes, fails or is abandoned."""
        if self.broken is None:
            self.broken = error
        while self._pending:
            transfer = self._pending.popleft()
            transfer.stop(self.broken)
            self._settle(transfer)

    def abandon(self) -> None:
        """The endpoint is gone: nothing is in flight any more, and every transfer is done."""
        for transfer in list(self._outstanding.values()):
            self._outbox.failed += transfer.in_flight
            transfer.failed += transfer.in_flight
            transfer.stop(self.error or LinkClosed(f"{transfer} was in flight when its link was closed"))
            self._finish(transfer)
        self.in_flight = 0

    def _settle(self, transfer: TransferState) -> None:
        if transfer.in_flight == 0 and (transfer.stopped or transfer.posted == transfer.total):
            self._finish(transfer)

    def _finish(self, transfer: TransferState) -> None:
        if not transfer.done:
            self._outstanding.pop(transfer.ticket, None)
            transfer.finish()
            self._outbox.finished.append(transfer)
