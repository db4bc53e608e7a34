"""The worker's side of one link: an endpoint, and the posting and draining of its queues.

Runs on the worker thread only. It never calls back: finished transfers and immediates go to the outbox.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from transport.errors import FabricError, LinkClosed, TransportError
from transport.fabric import abi, calls
from transport.fabric.domain import Domain, Region
from transport.fabric.posting import Loops, Poster, Slots
from transport.inbox import attempted
from transport.outgoing import Outbox, Outgoing

log = logging.getLogger(__name__)

_ETIMEDOUT = 110
_MOST_PHANTOMS = 1000
"""How many times in a row a queue may announce an error that it then does not hand out."""


class Lane:
    """Raises FabricError from its constructor and `connect`.

    `pump` raises when the queue cannot be used any more: then only `fail` is left.
    """

    def __init__(self, domain: Domain, loops: Loops, outbox: Outbox, stall_timeout_s: float) -> None:
        self._domain, self._outbox, self._stall_timeout_s = domain, outbox, stall_timeout_s
        self.endpoint = domain.open_endpoint()
        self.poster = Poster(loops, self.endpoint.ep, self.endpoint.writedata, self.endpoint.cq, self.endpoint.cq_read)
        self.outgoing = Outgoing(outbox)
        self.peer = ""
        self.closed = False
        self._slots = Slots(0)
        self._dest = abi.FI_ADDR_NOTAVAIL
        self._regions: list[Region] = []
        self._stalled_since: float | None = None
        self._phantoms = 0
        self._own_error: TransportError | None = None

    @property
    def error(self) -> TransportError | None:
        """See `transport.api.Link.error`."""
        return self.outgoing.error or self._own_error

    @property
    def blocked(self) -> bool:
        """The provider refused a post for now: the worker must come back soon."""
        return self._stalled_since is not None

    def keep(self, region: Region) -> None:
        """`region` is exposed to this lane's peer: it ends with the lane."""
        self._regions.append(region)

    def check_open(self) -> None:
        """Raises LinkClosed. What is asked of a lane may come after it has ended."""
        if self.closed:
            why = f"is broken: {self.error}" if self.error is not None else "is closed"
            raise LinkClosed(f"the link to {self.peer or 'its peer'} {why}")

    def connect(self, name: bytes, window: int, peer: str) -> None:
        self.check_open()
        self._dest = self.endpoint.insert(name)
        self._slots = Slots(min(window, self._domain.tx_depth))
        self.peer = peer

    def pump(self, entries: int = 0) -> bool:
        """Drains, then posts. `entries` are in the poster's buffer already. True if anything moved."""
        if self.closed:
            return False
        moved = self._drain(entries)
        return self._post() or moved

    def break_off(self, error: TransportError) -> None:
        self._stalled_since = None
        self.outgoing.break_off(error)

    def begin_close(self) -> bool:
        """Posts nothing more. True if it is worth lingering for what is in flight (see `Profile.receiver_pulls`)."""
        healthy = self.outgoing.broken is None
        self.break_off(LinkClosed(f"the link to {self.peer or 'its peer'} was closed"))
        return healthy and self.outgoing.in_flight > 0 and self._domain.profile.linger_s > 0

    def fail(self, error: TransportError) -> None:
        """The queue cannot be used: closes, and ends every transfer with `error`. What had completed counts."""
        self.break_off(error)
        self.close()

    def close(self) -> None:
        """Revokes, closes, drains; then every transfer is done. `begin_close` comes first. Idempotent.

        Each step is taken whatever the others raise; `error` says so if one that revokes has failed.
        """
        if self.closed:
            return
        self.closed = True
        attempted(self._drain_last, "the last reading of a link's queue")
        for region in self._regions:
            self._revoke(partial(self._domain.release, region))
        self._revoke(self.endpoint.close_ep)
        # From the first region's close on an immediate may come without its payload: it must not be counted.
        attempted(partial(self._drain_last, count_imms=False), "the emptying of a closed link's queue")
        attempted(self.endpoint.close, "closing a link's queue")
        self.outgoing.abandon()

    def _revoke(self, step: Callable[[], None]) -> None:
        error = attempted(step, "closing a link")
        if error is not None and self._own_error is None:
            text = f"closing the link failed, so its peer may still write to what was exposed: {error}"
            self._own_error = TransportError(text)

    def _drain_last(self, count_imms: bool = True) -> None:
        with suppress(FabricError):  # a queue that cannot be read has nothing more to give
            self._drain(count_imms=count_imms)

    def _drain(self, entries: int = 0, count_imms: bool = True) -> bool:
        moved = False
        while True:
            drained = self.poster.drain(self._slots, entries)
            entries = 0
            moved = moved or drained.code > 0 or len(drained.imms) > 0 or len(drained.tickets) > 0
            if count_imms and len(drained.imms):
                self._outbox.imms.append(drained.imms)
            if len(drained.tickets):
                self.outgoing.completed(drained.tickets)
            if drained.code == -abi.FI_EAVAIL:
                if not self._take_error():
                    return moved
                moved = True
            elif drained.code in (0, -abi.FI_EAGAIN):
                return moved
            elif drained.code < 0:
                raise self._error("fi_cq_read", drained.code)

    def _take_error(self) -> bool:
        """False if the queue has announced an error and has none."""
        code, entry = calls.read_error(self.poster.cq)
        if code in (0, -abi.FI_EAGAIN) and self._phantoms < _MOST_PHANTOMS:
            self._phantoms += 1
            return False
        if code <= 0:
            raise self._error("fi_cq_readerr", code or -abi.FI_EAGAIN)
        self._phantoms = 0
        error: TransportError = self._error("write", entry.err, posted=True)
        if self.closed and entry.err == abi.FI_ECANCELED:  # flushed by the close, which has its own reason
            error = self.outgoing.broken or error
        ticket = self._slots.release(entry.op_context or 0)
        if ticket is None:
            # Something of the peer has failed here. This side's writes go on, and fail by themselves if they must.
            if not self.closed:
                log.warning("%s (not a write of this side)", error)
                self._own_error = self._own_error or error
            return True
        self._stalled_since = None
        self.outgoing.failed(ticket, error)
        return True

    def _post(self) -> bool:
        moved = False
        while self._slots.available:
            transfer = self.outgoing.next
            if transfer is None:
                break
            desc = transfer.order.region.desc if transfer.order.region is not None else 0
            posted, code = self.poster.post(
                transfer.order, desc, self._dest, transfer.posted, transfer.ticket, self._slots
            )
            self.outgoing.posted(transfer, posted)
            if posted:
                moved, self._stalled_since = True, None
            if code == -abi.FI_EAGAIN:
                self._note_stall()
                break
            if code != 0:
                self.break_off(self._error("fi_writedata", code, posted=True))
        return moved

    def _note_stall(self) -> None:
        """A provider that answers EAGAIN with nothing in flight is connecting, or never will be connected."""
        now = time.monotonic()
        if self._stalled_since is None:
            self._stalled_since = now
        elif not self.outgoing.in_flight and now - self._stalled_since > self._stall_timeout_s:
            self.break_off(self._error("fi_writedata (no connection)", _ETIMEDOUT))

    def _error(self, call: str, code: int, posted: bool = False) -> FabricError:
        domain = self._domain
        return calls.fabric_error(domain.library, call, code, domain.profile.name, self.peer, posted)
