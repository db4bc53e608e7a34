"""The transfers of one link: dealt over its paths, posted in turn, done when nothing more can come. No provider."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from transport.errors import LinkClosed, TransportError
from transport.imm import ImmediateCounters, times_each
from transport.inbox import guarded
from transport.shard import Pair, deal, pairings
from transport.transfer import UNREGISTERED, Part, TransferState


@dataclass(slots=True)
class Outbox:
    """What the links of a transport have for its worker to deliver, and the counters of `Transport.stats`."""

    finished: deque[TransferState] = field(default_factory=deque)
    imms: deque[NDArray[np.int64] | list[int]] = field(default_factory=deque)
    messages: deque[tuple[Callable[[bytes], None], bytes]] = field(default_factory=deque)
    posted: int = 0
    completed: int = 0
    failed: int = 0
    bytes_completed: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    paths_lost: int = 0
    links: list[Outgoing] = field(default_factory=list)

    @property
    def sending(self) -> int:
        """Links that have transfers under way."""
        return sum(link.busy for link in self.links)

    def deliver(self, counters: ImmediateCounters) -> None:
        """Counts the immediates and calls what is due: full counters first, then messages, then finished transfers."""
        while self.imms or self.messages or self.finished:
            while self.imms:
                for on_full, imm in counters.count(self.imms.popleft()):
                    guarded(on_full, imm)
            while self.messages:
                on_message, message = self.messages.popleft()
                guarded(on_message, message)
            while self.finished:
                transfer = self.finished.popleft()
                if transfer.on_done is not None:
                    guarded(transfer.on_done, transfer)


class Path:
    """What goes from one NIC here to one NIC there, first in, first posted. `pair` holds their indices."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.pending: deque[Part] = deque()
        self.in_flight = 0
        self.broken: TransportError | None = None

    @property
    def next(self) -> Part | None:
        """The part whose writes are to be posted now. What was stopped is dropped here, not searched for before."""
        while self.pending and self.pending[0].transfer.stopped:
            self.pending.popleft()
        return self.pending[0] if self.pending else None


class Outgoing:
    """Used by the worker alone; finished transfers go to the outbox, never called back here.

    A path that breaks is taken out. What was queued on it and never posted is dealt to the others; a transfer of which
    a write was in flight there fails, because that write may or may not have landed. The last path that breaks breaks
    the link.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._paths: dict[Pair, Path] = {}
        self._pairings: list[list[Path]] = []
        self._turn = 0
        self._outstanding: dict[int, Part] = {}
        self._transfers: dict[TransferState, None] = {}
        self.broken: TransportError | None = None
        self.in_flight = 0
        self.posted_total = 0

    def connect(self, here: tuple[int, ...], there: tuple[int, ...]) -> list[Path]:
        """Makes the paths between NICs on these rails; returns all of them."""
        self._outbox.links.append(self)
        for pairs in pairings(here, there):
            self._pairings.append([self._paths.setdefault(pair, Path(pair)) for pair in pairs])
        return list(self._paths.values())

    @property
    def error(self) -> TransportError | None:
        """What broke the link; being closed by its owner is no breakage."""
        return None if isinstance(self.broken, LinkClosed) else self.broken

    @property
    def busy(self) -> bool:
        return bool(self._transfers)

    @property
    def transfers(self) -> list[TransferState]:
        """Those that are not done."""
        return list(self._transfers)

    @property
    def lost(self) -> list[Path]:
        return [path for path in self._paths.values() if path.broken is not None]

    def submit(self, transfer: TransferState) -> None:
        self._transfers[transfer] = None
        if self.broken is not None:
            transfer.stop(self.broken)
        source = transfer.order.region
        if source is not None and source.retired:  # between the caller's check and this
            transfer.stop(ValueError(UNREGISTERED))
        if transfer.stopped or not transfer.total:
            self._finish(transfer)
            return
        self._deal(transfer, 0, transfer.total)

    def posted(self, path: Path, count: int) -> None:
        """`count` more writes of the path's next part are in flight."""
        part = path.pending[0]
        if count:
            self._outstanding[part.ticket] = part
            part.at += count
            part.transfer.posted += count
            path.in_flight += count
            self.in_flight += count
            self.posted_total += count
            self._outbox.posted += count
        if part.at == part.stop:
            path.pending.popleft()

    def posted_alone(self, path: Path, part: Part) -> None:
        """A new transfer of one write, which was never queued, is in flight."""
        transfer = part.transfer
        self._transfers[transfer] = None
        part.path, part.at, transfer.posted = path, part.stop, 1
        self._outstanding[part.ticket] = part
        path.in_flight += 1
        self.in_flight += 1
        self.posted_total += 1
        self._outbox.posted += 1

    def completed(self, tickets: NDArray[np.int64]) -> None:
        """One write of each ticket has completed."""
        if len(self._outstanding) == 1:
            self.completed_of(next(iter(self._outstanding)), len(tickets))
            return
        for ticket, count in times_each(tickets):
            self.completed_of(ticket, count)

    def completed_of(self, ticket: int, count: int) -> None:
        """`count` writes of this ticket have completed."""
        part = self._ended(ticket, count)
        part.transfer.completed += count
        self._outbox.completed += count
        self._outbox.bytes_completed += count * part.block_bytes
        self._settle(part.transfer)

    def failed(self, ticket: int, error: TransportError) -> None:
        """One write has failed. That ends its path: providers tear the connection down with it."""
        part = self._ended(ticket, 1)
        part.transfer.failed += 1
        self._outbox.failed += 1
        part.transfer.stop(error)
        assert isinstance(part.path, Path)
        self.break_path(part.path, error)
        self._settle(part.transfer)

    def cancel(self, transfer: TransferState) -> None:
        if not transfer.done:
            transfer.stop(transfer.cancelled())
            self._settle(transfer)

    def break_path(self, path: Path, error: TransportError) -> None:
        """Nothing more is posted on it. What is in flight there stays so until it completes, fails or is abandoned."""
        if path.broken is not None:
            return
        path.broken = error
        self._outbox.paths_lost += 1
        left, path.pending = path.pending, deque()
        if all(other.broken is not None for other in self._paths.values()):
            self.break_off(error)
        for part in left:
            if self.broken is None and not part.transfer.stopped:
                self._deal(part.transfer, part.at, part.stop)
            part.stop = part.at

    def break_off(self, error: TransportError) -> None:
        """Nothing more is posted on the link."""
        if self.broken is None:
            self.broken = error
        for transfer in list(self._transfers):
            if transfer.posted < transfer.total:
                transfer.stop(self.broken)
                self._settle(transfer)

    def abandon(self, paths: list[Path] | None = None) -> None:
        """The endpoints of these paths (None: of the link) are gone: nothing is in flight on them any more."""
        gone = list(self._paths.values()) if paths is None else paths
        for part in [part for part in self._outstanding.values() if part.path in gone]:
            transfer, count = part.transfer, part.in_flight
            self._ended(part.ticket, count)
            transfer.failed += count
            self._outbox.failed += count
            why = part.path.broken if isinstance(part.path, Path) else None
            transfer.stop(why or self.error or LinkClosed(f"{transfer} was in flight when its link was closed"))
            self._settle(transfer)
        if paths is None:
            for transfer in list(self._transfers):
                self._finish(transfer)
            if self in self._outbox.links:
                self._outbox.links.remove(self)

    def _deal(self, transfer: TransferState, start: int, stop: int) -> None:
        """Blocks `start:stop` to the paths of this turn's pairing that are left, or to any that is."""
        pairing = self._pairings[self._turn % len(self._pairings)]
        alive = [path for path in pairing if path.broken is None]
        alive = alive or [path for path in self._paths.values() if path.broken is None]
        order = transfer.order
        if stop - start == 1:
            size = order.block_bytes if stop < transfer.total else order.last_bytes
            self._queue(alive[self._turn % len(alive)], Part(transfer, start, stop, size))
            self._turn += 1
            return
        odd = order.last_bytes != order.block_bytes and stop == transfer.total
        for which, first, last in deal(stop - start - odd, len(alive), self._turn):
            self._queue(alive[which], Part(transfer, start + first, start + last, order.block_bytes))
        if odd:
            self._queue(alive[(self._turn - 1) % len(alive)], Part(transfer, stop - 1, stop, order.last_bytes))
        self._turn += 1

    @staticmethod
    def _queue(path: Path, part: Part) -> None:
        part.path = path
        path.pending.append(part)

    def _ended(self, ticket: int, count: int) -> Part:
        part = self._outstanding[ticket]
        assert isinstance(part.path, Path)
        part.ended += count
        part.path.in_flight -= count
        self.in_flight -= count
        if not part.in_flight:  # posting more of it puts it back
            del self._outstanding[ticket]
        return part

    def _settle(self, transfer: TransferState) -> None:
        if transfer.in_flight == 0 and (transfer.stopped or transfer.posted == transfer.total):
            self._finish(transfer)

    def _finish(self, transfer: TransferState) -> None:
        if not transfer.done:
            self._transfers.pop(transfer, None)
            transfer.finish()
            self._outbox.finished.append(transfer)
