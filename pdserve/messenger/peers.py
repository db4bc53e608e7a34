"""The prefill nodes that a decode node has met: one link, one exposed region and one window each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pdserve.config import HandoffSettings
from pdserve.errors import MeetingRefused
from pdserve.kv.memory import KvMemory
from pdserve.kv.pool import PagePool
from pdserve.messenger.line import LostPaths, send
from pdserve.messenger.liveness import PeerWatch
from pdserve.messenger.meeting import ALONE, Replica, Transports, WireWish, refusal
from pdserve.messenger.wire import (
    MeetRefusal,
    MeetReply,
    MeetRequest,
    NodeCard,
    RegionGrant,
    ToPrefill,
    ToPrefillChannel,
)
from pdserve.types import Incarnation, NodeId, RequestId, SequenceOutput
from policies.sharding import ParallelLayout
from transport.api import Immediates, Link, Transport
from transport.choice import Choice
from transport.errors import DescriptorMismatch

Reroute = Callable[[RequestId, frozenset[NodeId], Callable[[NodeId | None], None]], None]
"""Asks for another prefill node; the reply may come on any thread."""


@dataclass(frozen=True, slots=True)
class ReceiverParts:
    """What a receiver is put together from. `memory`: of its first rank; the others' are alike."""

    card: NodeCard
    memory: KvMemory
    pool: PagePool
    transports: Transports
    settings: HandoffSettings
    wish: WireWish
    window: int  # writes granted to one peer
    channel: Callable[[NodeId], ToPrefillChannel]
    card_of: Callable[[NodeId], NodeCard | None]  # what discovery knows of a prefill node
    reroute: Reroute
    emit: Callable[[tuple[SequenceOutput, ...]], None]
    replica: Replica = ALONE


@dataclass(slots=True)
class Peer:
    """One prefill node. `link` is None until it has answered."""

    node: NodeId
    number: int  # of the meeting
    channel: ToPrefillChannel
    transport: Transport
    offered: Link
    window: int
    answer_by: float  # `time.monotonic()`
    incarnation: Incarnation | None = None
    parallel: ParallelLayout = field(default_factory=ParallelLayout)
    link: Link | None = None
    paths: LostPaths = field(default_factory=LostPaths)

    def send(self, message: ToPrefill) -> None:
        """By the link, which stands from the meeting on, or aside."""
        assert self.link is not None
        send(message, self.link, self.channel.send)

    @property
    def provider(self) -> str:
        return self.transport.provider

    @property
    def immediates(self) -> Immediates:
        return self.transport.immediates


class PeerTable:
    """Owned by the receiver's thread. `take(node, data)` gets what prefill nodes say, on the transport's thread."""

    def __init__(self, parts: ReceiverParts, take: Callable[[NodeId, bytes], None]) -> None:
        self._parts = parts
        self._take = take
        self._peers: dict[NodeId, Peer] = {}
        self._watch = PeerWatch()

    def get(self, node: NodeId) -> Peer | None:
        return self._peers.get(node)

    def met_as(self, number: int) -> Peer | None:
        """The peer whose meeting has this number."""
        return next((peer for peer in self._peers.values() if peer.number == number), None)

    def all(self) -> list[Peer]:
        return list(self._peers.values())

    def begin(self, node: NodeId, number: int, on_answer: Callable[[Peer, object], None]) -> None:
        """Opens a link for the peer, exposes our region on it, and asks to meet; the answer goes to `complete`.

        `number` is above every handoff's before. Raises MeetingRefused when the peer is unknown or no provider is
        common, and what the transport or the channel raises; nothing is left behind then.
        """
        card = self._parts.card_of(node)
        if card is None:
            raise MeetingRefused(f"{node} is not known")
        peer = self._open(node, number, self._parts.wish.choose(self._parts.card, card))
        try:
            request = self._offer(peer)
            self._peers[node] = peer
            peer.channel.meet(request, lambda answer: on_answer(peer, answer))
        except Exception:
            self.revoke(peer)
            raise

    def _offer(self, peer: Peer) -> MeetRequest:
        geometry, tp = self._parts.memory.geometry, self._parts.card.parallel.tp
        memories = self._parts.transports.memories[self._parts.replica.ranks(tp)]
        exposed = [peer.offered.expose(memory) for memory in memories]
        grants = tuple(
            RegionGrant(region.descriptor, geometry.layer_stride_bytes, geometry.block_bytes, geometry.pages)
            for region in exposed
        )
        return MeetRequest(self._parts.card, peer.number, peer.offered.address, grants, peer.window)

    def _open(self, node: NodeId, number: int, choice: Choice) -> Peer:
        transport = self._parts.transports.get(choice).transport
        window = min(self._parts.window, transport.max_window)  # every link has a receive queue of its own
        answer_by = time.monotonic() + self._parts.settings.request_timeout_s
        link = transport.open_link(partial(self._take, node))
        return Peer(node, number, self._parts.channel(node), transport, link, window, answer_by)

    def complete(self, peer: Peer, answer: object) -> bool:
        """Takes the answer to a meeting; False if the peer was revoked in the meantime, or has answered already.

        Raises MeetingRefused if the two cannot work together, the answer itself if it is an error, and what connecting
        raises; the link is closed then.
        """
        if self._peers.get(peer.node) is not peer or peer.link is not None:
            return False
        if not isinstance(answer, MeetReply):
            self.revoke(peer)
            raise answer if isinstance(answer, Exception) else MeetingRefused(_refusal_of(answer))
        try:
            self._connect(peer, answer)
        except Exception:
            self.revoke(peer)
            raise
        peer.incarnation, peer.parallel, peer.link = answer.card.incarnation, answer.card.parallel, peer.offered
        if answer.card.host == self._parts.card.host:
            self._watch.add(peer.incarnation, answer.card.pid)
        return True

    def _connect(self, peer: Peer, answer: MeetReply) -> None:
        if reason := refusal(answer.card, self._parts.card):
            raise MeetingRefused(reason)
        try:
            peer.offered.connect(answer.address, window=0, name=peer.node)
        except DescriptorMismatch as error:
            raise MeetingRefused(str(error)) from error

    def unanswered(self, now: float) -> list[Peer]:
        """Peers that were asked to meet and have not answered in time."""
        return [peer for peer in self._peers.values() if peer.link is None and now > peer.answer_by]

    def revoke(self, peer: Peer, *, watch: bool = False) -> None:
        """Closes the peer's link: on return nothing of it can land any more, where the transport revokes.

        With `watch`, `ended` still tells of its process.
        """
        if peer.incarnation is not None and not watch:
            self._watch.remove(peer.incarnation)
        peer.offered.close()
        if self._peers.get(peer.node) is peer:
            del self._peers[peer.node]

    def broken(self) -> list[tuple[Peer, str]]:
        """Met peers whose link has failed, and how. One that has lost a part of its paths is told of in the log."""
        for peer in self.all():
            if peer.link and peer.link.error is None:
                peer.paths.look(peer.node, peer.link)
        return [(peer, str(peer.link.error)) for peer in self.all() if peer.link and peer.link.error]

    def ended(self) -> list[Incarnation]:
        """Those whose process has ended (known on this host only), each once."""
        return self._watch.ended()

    def of(self, incarnation: Incarnation) -> Peer | None:
        return next((peer for peer in self._peers.values() if peer.incarnation == incarnation), None)

    def close(self) -> None:
        self._watch.close()


def _refusal_of(answer: object) -> str:
    return answer.reason if isinstance(answer, MeetRefusal) else f"it answered {answer!r}"
