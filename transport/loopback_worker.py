"""What the worker of a `LoopbackTransport` does with its links: post, land, pass fragments on, take paths out."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from transport.descriptors import LinkAddress
from transport.errors import FabricError, LinkClosed, PeerLost, TransportError
from transport.loopback_link import EIO, EKEYREJECTED, ENOTCONN, PROVIDER, Landing, LoopbackLink
from transport.loopback_net import LoopbackNet
from transport.loopback_wire import Flight, Wire
from transport.outgoing import Outbox, Path
from transport.transfer import Part


@dataclass(frozen=True, slots=True)
class Arrival:
    """At `link`: immediates of writes that have landed, or a fragment of a message."""

    link: LoopbackLink
    imm: int = 0
    count: int = 0
    fragment: bytes = b""


class LoopbackWorker:
    """Used by the worker thread alone, except `arrivals`, to which other transports append before they nudge."""

    def __init__(self, net: LoopbackNet, wire: Wire) -> None:
        self.net, self.wire = net, wire
        self.outbox = Outbox()
        self.links: list[LoopbackLink] = []
        self.arrivals: deque[Arrival] = deque()
        self.ended: list[threading.Event] = []
        self.failed_nics: set[int] = set()
        self._turns = itertools.count()

    def turn(self) -> bool:
        """One round over everything; True if anything moved."""
        moved = self._take_arrivals()
        for link in self.links:
            moved = self._post(link) or moved
            moved = self._send_fragments(link) or moved
        return self._land_due() or moved

    def make_paths(self, link: LoopbackLink, peer: LinkAddress) -> None:
        link.paths = link.outgoing.connect(link.address.rails, peer.rails)
        for lane in link.dead_lanes:
            self._fail_lane(link, lane)

    def fail_nic(self, nic: int) -> None:
        self.failed_nics.add(nic)
        for link in list(self.links):
            if nic in link.address.rails:
                self._fail_lane(link, link.address.rails.index(nic))

    def end_link(self, link: LoopbackLink, ended: threading.Event, error: TransportError | None) -> None:
        link.outgoing.break_off(error or LinkClosed(f"the link to {link.peer or 'its peer'} was closed"))
        self._cut_off(lambda flight: flight.link is link)
        link.outgoing.abandon()
        if link in self.links:
            self.links.remove(link)
        self.ended.append(ended)

    def _take_arrivals(self) -> bool:
        moved = False
        while self.arrivals:
            moved = True
            arrival = self.arrivals.popleft()
            if arrival.link.closed:
                continue
            if arrival.fragment:
                self._take_fragment(arrival.link, arrival.fragment)
            else:
                self.outbox.imms.append(np.full(arrival.count, arrival.imm, np.int64))
        return moved

    def _take_fragment(self, link: LoopbackLink, fragment: bytes) -> None:
        try:
            messages = link.flow.arrived(fragment)
        except ValueError as error:
            link.break_down(TransportError(f"the link to {link.peer or 'its peer'} is broken: {error}"))
            return
        self.outbox.messages_received += len(messages)
        if link.on_message is not None:
            self.outbox.messages.extend((link.hand_over, message) for message in messages)

    def _post(self, link: LoopbackLink) -> bool:
        """Each path in turn; another one is the first the next time."""
        moved = False
        first = next(self._turns) % max(1, len(link.paths))
        for path in link.paths[first:] + link.paths[:first]:
            while (part := path.next) is not None:
                count = min(part.stop - part.at, link.room(path.pair[0]))
                if count <= 0:
                    break
                self.wire.carry(link, path, part, count)
                link.outgoing.posted(path, count)
                moved = True
        return moved

    def _send_fragments(self, link: LoopbackLink) -> bool:
        moved = False
        while link.flow.wants_to_send and (path := link.message_path) is not None:
            fragment = link.flow.next()
            assert fragment is not None
            self.wire.carry_fragment(link, path, fragment)
            moved = True
        return moved

    def _land_due(self) -> bool:
        moved, now = False, time.monotonic()
        while (flight := self.wire.next(now)) is not None:
            moved = True
            target = self.net.find(self._target_name(flight))
            if target is None or (flight.part is None and target[0].closed):
                self._lose_path(flight.link, flight.path, self._lost(flight.link, ENOTCONN))
            elif flight.part is None:
                if not target[0].silent:
                    target[0].home.deliver(Arrival(target[0], fragment=flight.fragment))
            else:
                self._land(flight, flight.part, *target)
        return moved

    def _land(self, flight: Flight, part: Part, target: LoopbackLink, lane: int) -> None:
        blocks = self.wire.kept(flight)
        order, outgoing = part.transfer.order, flight.link.outgoing
        landed, code = target.land(Landing(order, lane, part.block_bytes, blocks))
        if landed:
            target.home.deliver(Arrival(target, order.imm, landed))
        if code == 0:
            outgoing.completed_of(part.ticket, flight.count)
        elif code > 0:
            if landed:
                outgoing.completed_of(part.ticket, landed)
            error = self._lost(flight.link, code)
            outgoing.failed(part.ticket, error)
            self._lose_path(flight.link, flight.path, error)

    @staticmethod
    def _lost(link: LoopbackLink, code: int) -> PeerLost:
        text = "key was rejected" if code == EKEYREJECTED else "the peer is gone"
        return PeerLost("write", code, text, PROVIDER, link.peer)

    @staticmethod
    def _target_name(flight: Flight) -> bytes:
        assert flight.link.target is not None
        return flight.link.target.names[flight.path.pair[1]]

    def _fail_lane(self, link: LoopbackLink, lane: int) -> None:
        nic = link.address.rails[lane]
        link.dead_lanes.add(lane)
        self.net.remove(link.address.names[lane])
        error = FabricError("write", EIO, "the NIC has failed", PROVIDER, link.peer, nic=f"loopback{nic}")
        for path in [path for path in link.paths if path.pair[0] == lane]:
            self._lose_path(link, path, error)
        if len(link.dead_lanes) == len(link.address.rails):
            link.outgoing.break_off(error)

    def _lose_path(self, link: LoopbackLink, path: Path, error: TransportError) -> None:
        """What was under way on it may or may not have arrived."""
        carried_messages = path is link.message_path
        link.outgoing.break_path(path, error)
        self._cut_off(lambda flight: flight.path is path)
        link.outgoing.abandon([path])
        if carried_messages:
            link.flow.repeat()

    def _cut_off(self, which: Callable[[Flight], bool]) -> None:
        for flight in self.wire.take_out(which):
            target = self.net.find(self._target_name(flight))
            if flight.part is not None and target is not None and self.wire.coin():
                landing = Landing(flight.part.transfer.order, target[1], flight.part.block_bytes, flight.blocks)
                landed, _ = target[0].land(landing)
                if landed:
                    target[0].home.deliver(Arrival(target[0], landing.order.imm, landed))
