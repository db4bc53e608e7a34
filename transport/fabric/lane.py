"""One NIC of one link: an endpoint, and the posting and draining of its queues.

Runs on the worker thread only. It never calls back: finished transfers, immediates and fragments of messages go to
what the lanes of a link share.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from transport.errors import FabricError, TransportError
from transport.fabric import abi, calls
from transport.fabric.domain import Region
from transport.fabric.endpoint import Endpoint
from transport.fabric.mailbox import MESSAGE_SLOTS, Mailbox
from transport.fabric.posting import Drained, Loops, Poster, Run
from transport.fabric.regions import FabricSource, Nic
from transport.fabric.slots import Slots
from transport.fabric.traffic import Route, Traffic
from transport.inbox import attempted
from transport.messages import BUFFERS
from transport.outgoing import Path
from transport.transfer import Part, TransferState

log = logging.getLogger(__name__)

_ETIMEDOUT = 110
FEW = 2
"""Up to so many completions are taken one by one."""
_WRITE_BITS = abi.FI_WRITE | abi.FI_REMOTE_WRITE
_SLICE_NS = 1_000_000
"""How long the lanes of all links that send post and read by turns before anything else is looked at."""
_CALM_READS = 8
"""How often in a row the queue of a link that closes must be found empty."""
_CALMING_S = 0.25
_MOST_PHANTOMS = 1000
"""How many times in a row a queue may announce an error that it then does not hand out."""


class Lane:
    """Raises FabricError from its constructor.

    `pump` raises when the queue cannot be used any more: then only `close` is left. `share` is how many writes it may
    have outstanding, `own_error` what went wrong on it that was not of its own doing.
    """

    def __init__(self, nic: Nic, loops: Loops, traffic: Traffic) -> None:
        self.nic, self._domain, self._traffic = nic, nic.domain, traffic
        self._slots = Slots(nic.domain.tx_depth, MESSAGE_SLOTS)
        self.endpoint = Endpoint(nic.domain)
        self.poster = Poster(loops, self.endpoint)
        self.routes: list[Route] = []
        self.share = 0
        self.closed = False
        self.calm = True
        """No stream comes in, of which the loop takes more at once: the queue was found empty before."""
        self.own_error: TransportError | None = None
        self.revoked = False
        """It is closed, and every step that ends the peer's access has succeeded."""
        self._regions: list[Region] = []
        # While a network is read: hardware needs nobody to move its bytes.
        self._slice_ns = 0 if nic.domain.profile.reach == "rdma" else _SLICE_NS
        self._turn = 0
        self._phantoms = 0
        try:
            self.mailbox = Mailbox(nic.domain, self.endpoint, self._slots)
            try:
                self._receive()
            except FabricError:
                self.endpoint.close()
                self.mailbox.close()
                raise
        except FabricError:
            self.endpoint.close()
            raise

    @property
    def idle(self) -> bool:
        """Nothing is queued."""
        for route in self.routes:  # noqa: SIM110 (a third of the time, in every turn)
            if route.path.pending:
                return False
        return True

    @property
    def paths(self) -> list[Path]:
        return [route.path for route in self.routes]

    def expose(self, region: Region) -> None:
        """`region` is exposed to this link's peer: it ends with the lane."""
        self._regions.append(region)

    def pump(self, entries: int = 0) -> bool:
        """Drains, then posts. `entries` are in the poster's buffer already. True if anything moved."""
        moved = self._drain(entries)
        if self.mailbox.unposted:
            self._receive()
        return self.post() or moved

    def close(self) -> None:
        """Revokes, closes, drains. What was in flight is for the caller to abandon. Idempotent.

        Each step is taken whatever the others raise; `own_error` says so if one that revokes has failed.
        """
        if self.closed:
            return
        self.closed = self.revoked = True
        attempted(self._drain_last, "the last reading of a link's queue")
        for region in self._regions:
            self._revoke(partial(self._domain.release, region))
        # From the first region's close on an immediate may come without its payload: it must not be counted.
        attempted(self._drain_until_calm, "the emptying of a revoked link's queue")
        self._revoke(self.endpoint.close_ep)
        attempted(partial(self._drain_last, count_imms=False), "the emptying of a closed link's queue")
        attempted(self.endpoint.close, "closing a link's queue")
        attempted(self.mailbox.close, "releasing a link's buffers")

    def post(self) -> bool:
        """True if anything was posted."""
        if self.idle:
            return False
        busy = [route for route in self.routes if route.path.next is not None]
        if not busy:
            return False
        if len(busy) == 1:
            return self._post(busy[0], self._room())
        moved = False
        self._turn += 1
        for k in range(len(busy)):
            share = -(-self._room() // (len(busy) - k))
            if share > 0:
                moved = self._post(busy[(self._turn + k) % len(busy)], share) or moved
        return moved

    def post_alone(self, route: Route, transfer: TransferState) -> bool:
        """Posts a transfer of one write at once; False if it must be queued, and nothing has happened then."""
        outgoing, path = self._traffic.outgoing, route.path
        if path.pending or self.closed or outgoing.broken is not None or outgoing.in_flight >= self._traffic.window:
            return False
        if self._slots.taken >= min(self.share, self._slots.writes):
            return False
        part = Part(transfer, 0, 1, transfer.order.last_bytes)
        order, request = route.ready
        if order is not transfer.order:
            run = self._run(part, route, 1)
            if run is None:
                return False
            request = self.poster.request(run, self._slots)
            route.ready = transfer.order, request
        if self.poster.post_one(request, part.ticket, self._slots):
            return False
        self.nic.posted += 1
        outgoing.posted_alone(path, part)
        return True

    def send(self, route: Route, fragment: bytes) -> bool:
        """False if it must be tried again. What fails breaks the path."""
        code = self.mailbox.send(fragment, route.dest, route.path)
        if code == -abi.FI_EAGAIN:
            self._note_stall(route, "fi_send", alone=not route.path.in_flight and not self.mailbox.sending)
            return False
        route.stalled_since = None
        if code:
            self._traffic.outgoing.break_path(route.path, self._error("fi_send", code, posted=True))
        return True

    def _room(self) -> int:
        """Writes that it may post now."""
        room = min(self._slots.available, self._traffic.window - self._traffic.outgoing.in_flight)
        return min(room, self.share - self._slots.taken)

    def _post(self, route: Route, most: int) -> bool:
        moved = False
        path, outgoing = route.path, self._traffic.outgoing
        while most > 0 and (part := path.next) is not None:
            long = self._slice_ns > 0 and part.stop - part.at > most
            run = self._run(part, route, part.stop - part.at if long else most)
            if run is None:
                break
            if long:
                slice_ns = self._slice_ns // max(1, self._traffic.outbox.sending)
                posted, code, drained = self.poster.stream(run, self._slots, most, slice_ns)
                outgoing.posted(path, posted)
                self._settle(drained)
            else:
                posted, code = self.poster.post(run, self._slots)
                outgoing.posted(path, posted)
            self.nic.posted += posted
            most -= posted
            if posted:
                moved, route.stalled_since = True, None
            if code == -abi.FI_EAGAIN:
                self._note_stall(route, "fi_writedata", alone=not path.in_flight)
                break
            if code != 0:
                outgoing.break_path(path, self._error("fi_writedata", code, posted=True))
        return moved

    def _run(self, part: Part, route: Route, most: int) -> Run | None:
        """None, and the path broken, if this NIC does not know the source."""
        order = part.transfer.order
        # An immediate has no payload, but providers that want local descriptors look at this one all the same.
        source, desc = self.mailbox.address, self.mailbox.desc
        if order.region is not None:
            assert isinstance(order.region, FabricSource)
            region = order.region.regions[self.nic.index]
            if region is None:
                error = TransportError(f"{self.nic.name} could not register the source of {part.transfer}")
                self._traffic.outgoing.break_path(route.path, error)
                return None
            source, desc = order.source, region.desc
        key = int.from_bytes(order.keys[route.path.pair[1]], "little")
        stop = min(part.stop, part.at + most)
        return Run(order, part.at, stop, part.block_bytes, part.ticket, source, desc, route.dest, key)

    def _note_stall(self, route: Route, call: str, *, alone: bool) -> None:
        """A provider that answers EAGAIN with nothing in flight is connecting, or never will be connected."""
        now = time.monotonic()
        if route.stalled_since is None or not alone:
            route.stalled_since = now
        elif now - route.stalled_since > self._traffic.stall_timeout_s:
            failed = f"{call} (no connection within {self._traffic.stall_timeout_s:g} s: can this NIC reach its peer?)"
            self._traffic.outgoing.break_path(route.path, self._error(failed, _ETIMEDOUT))
            route.stalled_since = None

    def _receive(self) -> None:
        code = self.mailbox.receive()
        if code not in (0, -abi.FI_EAGAIN):
            raise self._error("fi_recv", code)

    def _revoke(self, step: Callable[[], None]) -> None:
        error = attempted(step, "closing a link")
        self.revoked = self.revoked and error is None
        if error is not None and self.own_error is None:
            text = f"closing the link failed, so its peer may still write to what was exposed: {error}"
            self.own_error = TransportError(text)

    def _drain_last(self, count_imms: bool = True) -> None:
        with suppress(FabricError):  # a queue that cannot be read has nothing more to give
            self._drain(count_imms=count_imms)

    def _drain_until_calm(self) -> None:
        """Reads until nothing comes any more: `verbs;ofi_rxm` (libfabric 2.5) crashes in the close of an endpoint whose
        queue has not been read. With the regions closed, no write with a payload can succeed after this."""
        calm, until = 0, time.monotonic() + _CALMING_S
        with suppress(FabricError):
            while calm < _CALM_READS and time.monotonic() < until:
                calm = 0 if self._drain(count_imms=False) else calm + 1

    def _drain(self, entries: int = 0, count_imms: bool = True) -> bool:
        moved = False
        while True:
            drained = self.poster.drain(self._slots, entries)
            entries, code = 0, drained.code
            moved = self._settle(drained, count_imms) or moved
            if code == -abi.FI_EAGAIN or code == 0:
                self._phantoms = 0
                return moved
            if code == -abi.FI_EAVAIL:
                if not self._take_error():
                    return moved
            elif code < 0:
                raise self._error("fi_cq_read", code)
            moved = True

    def _settle(self, drained: Drained, count_imms: bool = True) -> bool:
        """True if there was anything."""
        tickets, imms, events, _ = drained
        if len(imms) and count_imms:
            self._traffic.outbox.imms.append(imms)
        if len(tickets):
            self._traffic.outgoing.completed(tickets)
        if len(events):
            self._traffic.fragments += self.mailbox.settle(events)
        return bool(len(imms) or len(tickets) or len(events))

    def take_own(self, context: int) -> None:
        """The write with this context has completed."""
        if not self.closed and (ticket := self._slots.release(context)) is not None:
            self._traffic.outgoing.completed_of(ticket, 1)

    def take_few(self, count: int) -> bool:
        """Takes entries from the buffer one by one, faster than the loop does; False if there are messages among them.

        They are taken to have been all: reading an empty queue costs as much as taking one.
        """
        words, slots = self.poster.words, self._slots
        last = count * abi.CQ_ENTRY_WORDS
        for at in range(0, last, abi.CQ_ENTRY_WORDS):
            if words[at + 1] & _WRITE_BITS != abi.FI_REMOTE_WRITE and slots.message_slot(words[at]) is not None:
                return False
        imms = []
        for at in range(0, last, abi.CQ_ENTRY_WORDS):
            if words[at + 1] & _WRITE_BITS == abi.FI_REMOTE_WRITE:
                imms.append(words[at + 4] & 0xFFFFFFFF)
            else:
                self.take_own(words[at])
        if imms:
            self._traffic.outbox.imms.append(imms)
        return True

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
            error = self._traffic.outgoing.broken or error
        foreign = entry.flags & _WRITE_BITS == abi.FI_REMOTE_WRITE
        context = 0 if foreign else entry.op_context or 0
        ticket, slot = self._slots.release(context), self._slots.message_slot(context)
        if ticket is not None:
            self._traffic.outgoing.failed(ticket, error)
        elif slot is not None and slot < BUFFERS:
            self._traffic.outgoing.break_path(self.mailbox.sent(slot), error)
        else:
            self._note_foreign(error, slot)
        return True

    def _note_foreign(self, error: TransportError, slot: int | None) -> None:
        """Something of the peer has failed here. This side's writes go on, and fail by themselves if they must.

        Raises `error` if a message cannot be received any more.
        """
        if slot is not None:
            self.mailbox.missed(slot)
        if self.closed:
            return
        if slot is not None:
            raise error
        log.warning("%s (not a write of this side)", error)
        self.own_error = self.own_error or error

    def _error(self, call: str, code: int, posted: bool = False) -> FabricError:
        return self._domain.error(call, code, self._traffic.peer, posted)
