"""The worker's side of one link: its lanes, one per NIC, and what they share. Runs on the worker thread only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from transport.api import LinkAddress, Memory
from transport.doorbell import Ringer
from transport.errors import FabricError, LinkClosed, TransportError
from transport.fabric.domain import Region
from transport.fabric.lane import FEW, Lane
from transport.fabric.posting import Loops
from transport.fabric.regions import Nic
from transport.fabric.talk import Talk
from transport.fabric.traffic import Route, Traffic
from transport.inbox import attempted
from transport.messages import MessageFlow
from transport.outgoing import Outbox, Outgoing
from transport.transfer import TransferState

log = logging.getLogger(__name__)


class LinkEnd:
    """Opens a lane on every NIC; one that cannot be opened is left out. Raises FabricError if none can.

    Where a method raises, the link cannot be used any more: then only `fail` is left, unless it says otherwise.
    """

    def __init__(self, nics: Sequence[Nic], loops: Loops, outbox: Outbox, stall_timeout_s: float) -> None:
        self.outgoing = Outgoing(outbox)
        self.closed = False
        self.stirred = True
        """Something waits to be posted or sent, whether or not a queue has anything."""
        self._outbox = outbox
        self._traffic = Traffic(outbox, self.outgoing, stall_timeout_s)
        self.talk = Talk(self._traffic)
        self.lanes = _opened(nics, loops, self._traffic)
        """Indexed as the names of the link's address are, those included that were lost."""
        self.names = tuple(lane.endpoint.name for lane in self.lanes)
        self.rails = tuple(lane.nic.domain.rail for lane in self.lanes)
        self.max_write_bytes = min(lane.nic.domain.max_write_bytes for lane in self.lanes)
        self.wakes = all(lane.endpoint.wait_fd >= 0 for lane in self.lanes)
        """Whatever comes wakes this side by itself; else `doorbell` names what the peer is to ring."""
        self.doorbell = b""
        self._ringer = Ringer(b"")
        self._routes: list[Route] = []
        self._own_error: TransportError | None = None
        self._linger_s = nics[0].domain.profile.linger_s

    @property
    def peer(self) -> str:
        return self._traffic.peer

    @property
    def flow(self) -> MessageFlow:
        return self.talk.flow

    @property
    def error(self) -> TransportError | None:
        """See `transport.api.Link.error`."""
        if self.outgoing.error is not None or self._own_error is not None:
            return self.outgoing.error or self._own_error
        errors = [lane.own_error for lane in self.lanes]
        return errors[0] if all(error is not None for error in errors) else None

    @property
    def lost_paths(self) -> tuple[str, ...]:
        names = [lane.nic.name for lane in self.lanes]
        there = self.peer or "its peer"
        return tuple(f"{names[p.pair[0]]} to NIC {p.pair[1]} of {there}: {p.broken}" for p in self.outgoing.lost)

    @property
    def revoked(self) -> bool:
        """See `transport.api.Link.revoked`."""
        return all(lane.revoked for lane in self.lanes)

    @property
    def open_lanes(self) -> list[Lane]:
        return [lane for lane in self.lanes if not lane.closed]

    @property
    def blocked(self) -> bool:
        """The provider refused a post for now: the worker must come back soon."""
        return any(route.stalled_since is not None and route.path.broken is None for route in self._routes)

    @property
    def busy(self) -> bool:
        """Something is to be sent or under way."""
        return self.outgoing.busy or self.talk.busy

    def check_open(self) -> None:
        """Raises LinkClosed. What is asked of a link may come after it has ended."""
        if self.closed:
            why = f"is broken: {self.error}" if self.error is not None else "is closed"
            raise LinkClosed(f"the link to {self.peer or 'its peer'} {why}")

    def expose(self, memory: Memory) -> tuple[int, tuple[bytes, ...]]:
        """(base, keys): exposed on every lane. Raises LinkClosed, FabricError; the link is as it was then."""
        self.check_open()
        regions: dict[int, Region] = {}
        failed: list[tuple[Lane, FabricError]] = []
        for lane in self.open_lanes:
            try:
                regions[lane.nic.index] = lane.nic.domain.expose(memory)
            except FabricError as error:
                failed.append((lane, error))
            except TransportError:  # this memory is not for that provider: nothing is wrong with the NIC
                for other in (lane for lane in self.open_lanes if lane.nic.index in regions):
                    step = partial(other.nic.domain.release, regions[other.nic.index])
                    attempted(step, "taking back an exposure")
                raise
        if not regions:
            raise failed[0][1]
        for lane, failure in failed:
            self.lose(lane, failure)
        for lane in self.open_lanes:
            lane.expose(regions[lane.nic.index])
        keys = tuple(regions[lane.nic.index].key if lane.nic.index in regions else bytes(8) for lane in self.lanes)
        return next(iter(regions.values())).base, keys

    def connect(self, peer: LinkAddress, window: int, name: str) -> None:
        """Raises LinkClosed, ValueError, FabricError; nothing is connected then."""
        self.check_open()
        inserted = {}
        for i, lane in enumerate(self.lanes):
            for j, there in enumerate(peer.names):
                if not lane.closed:
                    inserted[i, j] = lane.endpoint.insert(there)
        self._traffic.peer, self._traffic.window = name, window
        self._ringer = Ringer(peer.doorbell)
        for path in self.outgoing.connect(self.rails, peer.rails):
            lane = self.lanes[path.pair[0]]
            if lane.closed:
                self.outgoing.break_path(path, lane.own_error or LinkClosed(f"{lane.nic.name} was lost"))
                continue
            route = Route(path, inserted[path.pair])
            lane.routes.append(route)
            self._routes.append(route)
        self._share_window()
        self.talk.begin([(self.lanes[route.path.pair[0]], route) for route in self._routes])
        self.stirred = True

    def submit(self, transfer: TransferState) -> None:
        """Queues it, and posts at once what may be."""
        source = transfer.order.region
        if len(self._routes) == 1 and transfer.total == 1 and not (source is not None and source.retired):
            route = self._routes[0]
            if self.lanes[route.path.pair[0]].post_alone(route, transfer):
                if self._ringer.rings:
                    self._ringer.ring()
                return
        self.outgoing.submit(transfer)
        self.stirred = True  # until it is posted, whatever comes
        moved = False
        for lane in self.lanes:
            if not lane.closed:
                moved = lane.post() or moved
        if moved and self._ringer.rings:
            self._ringer.ring()
        self.stirred = self._unsettled()

    def cancel(self, transfer: TransferState) -> None:
        self.outgoing.cancel(transfer)
        self.stirred = True

    def send(self, message: bytes) -> None:
        if not self.closed:
            self.talk.send(message)
            self.stirred = True

    def pump(self, lane: Lane, entries: int = 0) -> bool:
        """Drains and posts one lane, then sends what messages wait. True if anything moved."""
        calm, lane.calm = lane.calm, False
        if calm and 0 < entries <= FEW and not self.stirred and not lane.closed and lane.take_few(entries):
            if self._ringer.rings:
                self._ringer.ring()
            return True
        if lane.closed:
            return False
        try:
            moved = lane.pump(entries)
        except Exception as error:
            log.exception("the link to %s loses %s", self.peer or "a peer", lane.nic.name)
            self.lose(lane, _as_transport_error(error))
            moved = True
        if self.talk.due:
            moved = self.talk.turn() or moved
        if moved and self._ringer.rings:
            self._ringer.ring()
        self.stirred = self._unsettled()
        if not self.stirred:
            for route in self._routes:  # what was refused has been taken back: nothing is tried again
                route.stalled_since = None
        return moved

    def lose(self, lane: Lane, error: TransportError) -> None:
        """Takes the lane out. What is queued there goes by the others, what is in flight there fails."""
        lane.own_error = lane.own_error or error
        for path in lane.paths:
            self.outgoing.break_path(path, error)
        lane.close()
        self.outgoing.abandon(lane.paths)
        self.talk.repeat()
        self.stirred = True
        if self.open_lanes:
            self._share_window()
        else:
            raise error

    def begin_close(self) -> bool:
        """Posts nothing more. True if it is worth lingering for what is in flight (see `Profile.receiver_pulls`)."""
        healthy = self.outgoing.broken is None
        self.outgoing.break_off(LinkClosed(f"the link to {self.peer or 'its peer'} was closed"))
        return healthy and (self.talk.busy or (self.outgoing.in_flight > 0 and self._linger_s > 0))

    @property
    def drained(self) -> bool:
        """Lingering has nothing left to wait for."""
        return not self.outgoing.in_flight and not self.talk.busy

    def fail(self, error: TransportError) -> None:
        """The link cannot be used: closes, and ends every transfer with `error`. What had completed counts."""
        self._own_error = self._own_error or error
        self.outgoing.break_off(error)
        self.close()

    def close(self) -> None:
        """Revokes, closes, drains; then every transfer is done. `begin_close` comes first. Idempotent."""
        if self.closed:
            return
        self.closed = True
        for lane in self.lanes:
            attempted(lane.close, "closing a lane of a link")
            self._own_error = self._own_error or (lane.own_error if self.outgoing.error is None else None)
        self.talk.end()
        self._ringer.close()
        self.outgoing.abandon()

    def _unsettled(self) -> bool:
        for lane in self.lanes:
            if not lane.closed and (lane.mailbox.unposted or not lane.idle):
                return True
        return self.talk.chatty

    def _share_window(self) -> None:
        lanes = self.open_lanes
        for lane in lanes:
            lane.share = max(1, self._traffic.window // len(lanes)) if self._traffic.window else 0


def _opened(nics: Sequence[Nic], loops: Loops, traffic: Traffic) -> list[Lane]:
    lanes: list[Lane] = []
    failure: FabricError | None = None
    for nic in nics:
        try:
            lanes.append(Lane(nic, loops, traffic))
        except FabricError as error:
            log.warning("a link does without %s: %s", nic.name, error)
            failure = error
    if not lanes:
        assert failure is not None
        raise failure
    return lanes


def _as_transport_error(error: Exception) -> TransportError:
    return error if isinstance(error, TransportError) else TransportError(f"the link failed: {error!r}")
