"""The decode nodes that a prefill node has met: one link towards each incarnation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from pdserve.errors import MeetingRefused
from pdserve.kv.memory import KvMemory
from pdserve.messenger.answers import Answers
from pdserve.messenger.line import LostPaths
from pdserve.messenger.liveness import PeerWatch
from pdserve.messenger.meeting import Replica, Transports, WireWish, refusal
from pdserve.messenger.wire import MeetRefusal, MeetReply, MeetRequest, NodeCard
from pdserve.types import Incarnation, NodeId
from policies.layout import PageGeometry
from policies.sharding import shards
from transport.api import Link, SourceRegion
from transport.choice import Choice
from transport.errors import TransportError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """One decode node: what it told us, the link that writes to it, and what it was answered."""

    request: MeetRequest
    link: Link
    sources: tuple[SourceRegion, ...]  # of our ranks
    answers: Answers
    paths: LostPaths = field(default_factory=LostPaths)


class Own(Protocol):
    """What is needed of this side."""

    @property
    def card(self) -> NodeCard: ...
    @property
    def memory(self) -> KvMemory: ...
    @property
    def transports(self) -> Transports: ...
    @property
    def wish(self) -> WireWish: ...
    @property
    def replica(self) -> Replica: ...


class Destinations:
    """Owned by the sender's thread. `take(node, data)` gets what decode nodes say, on the transport's thread."""

    def __init__(self, own: Own, take: Callable[[NodeId, bytes], None]) -> None:
        self._card = own.card
        self._transports = own.transports
        self._wish = own.wish
        self._ranks = own.replica.ranks(own.card.parallel.tp)
        self._geometry = own.memory.geometry
        self._take = take
        self._met: dict[Incarnation, Destination] = {}
        self._last: dict[Incarnation, int] = {}  # number of the last meeting, also of those that were lost
        self._open: dict[Incarnation, int] = {}  # number of the first meeting whose link may not have closed
        self._watch = PeerWatch()

    def get(self, incarnation: Incarnation) -> Destination | None:
        return self._met.get(incarnation)

    def all(self) -> list[Incarnation]:
        return list(self._met)

    def others_at(self, card: NodeCard) -> list[Incarnation]:
        """Other incarnations of a node: of these at most one can live, and it may be on a host that reports no end."""
        return [
            incarnation
            for incarnation, peer in self._met.items()
            if peer.request.card.node_id == card.node_id and incarnation != card.incarnation
        ]

    def answered(self, request: MeetRequest) -> MeetReply | MeetRefusal | None:
        """The answer to a meeting that is not new: repeated, or overtaken by a later one."""
        incarnation = request.card.incarnation
        last = self._last.get(incarnation, -1)
        if request.number > last:
            return None
        if request.number == last and incarnation in self._met:
            return self._reply(incarnation)
        return MeetRefusal(
            f"meeting {request.number} is over: {request.card.node_id} has asked for a later one, or left"
        )

    def meet(self, request: MeetRequest) -> MeetReply | MeetRefusal:
        """Compares cards and opens a link, or says what differs. The incarnation must not be met already."""
        theirs = request.card
        self._last[theirs.incarnation] = request.number
        reason = refusal(self._card, theirs) or unfit_regions(request, self._geometry) or self._connect(request)
        if reason is not None:
            _log.warning("refused %s: %s", theirs.node_id, reason)
            return MeetRefusal(reason)
        _log.info("met %s over %s, window %d", theirs.node_id, request.address.provider, request.window)
        return self._reply(theirs.incarnation)

    def _reply(self, incarnation: Incarnation) -> MeetReply:
        peer = self._met[incarnation]
        through = min(peer.request.number, self._open.get(incarnation, peer.request.number)) - 1
        return MeetReply(self._card, peer.link.address, through)

    def _connect(self, request: MeetRequest) -> str | None:
        try:
            choice = self._wish.choose(self._card, request.card)
            theirs = request.address.provider
            if theirs != choice.provider:
                return f"provider differs: {choice.provider} at {self._card.node_id}, {theirs} at the peer"
            self._open_link(choice, request)
        except (MeetingRefused, TransportError, ValueError) as error:
            return str(error)
        if request.card.host == self._card.host:
            self._watch.add(request.card.incarnation, request.card.pid)
        return None

    def _open_link(self, choice: Choice, request: MeetRequest) -> None:
        opened = self._transports.get(choice)
        link = opened.transport.open_link(partial(self._take, request.card.node_id))
        try:
            link.connect(request.address, window=request.window, name=request.card.node_id)
        except Exception:
            link.close()
            raise
        self._met[request.card.incarnation] = Destination(
            request, link, opened.sources[self._ranks], Answers(request.number)
        )

    def forget(self, incarnation: Incarnation, *, watch: bool = False) -> Destination | None:
        """Takes it out; the caller closes its link once its transfers are marked. With `watch`, `ended` still tells."""
        if not watch:
            self._watch.remove(incarnation)
        return self._met.pop(incarnation, None)

    def close_link(self, peer: Destination) -> None:
        """Every transfer of it is done on return. A link of which a part did not close is remembered."""
        peer.link.close()
        if not peer.link.revoked:
            self._open.setdefault(peer.request.card.incarnation, peer.request.number)

    def may_still_read(self, incarnation: Incarnation) -> bool:
        """Whether closing the link leaves a peer that may read our memory, for as long as it lives."""
        peer = self._met.get(incarnation)
        opened = None if peer is None else self._transports.opened(peer.request.address.provider)
        return opened is not None and opened.transport.receiver_pulls

    def broken(self) -> list[tuple[Incarnation, str]]:
        """Those whose link has failed, and how. One that has lost a part of its paths is told of in the log."""
        for peer in self._met.values():
            if peer.link.error is None:
                peer.paths.look(peer.request.card.node_id, peer.link)
        return [(who, str(peer.link.error)) for who, peer in self._met.items() if peer.link.error]

    def ended(self) -> list[Incarnation]:
        """Those whose process has ended (known on this host only)."""
        return self._watch.ended()

    def close(self) -> None:
        self._watch.close()


def unfit_regions(request: MeetRequest, here: PageGeometry) -> str | None:
    """Why what the decode node exposes is not what its card promises: one region per rank, of its blocks."""
    theirs = request.card
    if len(request.regions) != theirs.parallel.tp:
        return f"{theirs.node_id} has {theirs.parallel.tp} ranks and exposes {len(request.regions)} regions"
    if theirs.rails and len(theirs.rails) != theirs.parallel.tp:
        return f"{theirs.node_id} has {theirs.parallel.tp} ranks and names the rails of {len(theirs.rails)}"
    held = shards(theirs.groups[0], theirs.parallel.tp).heads
    block_bytes = replace(here, kv_heads=held).block_bytes
    for rank, grant in enumerate(request.regions):
        if (grant.block_bytes, grant.layer_stride_bytes) != (block_bytes, grant.pages * block_bytes):
            return (
                f"rank {rank} of {theirs.node_id} has blocks of {grant.block_bytes} bytes, {grant.layer_stride_bytes}"
                f" bytes a layer of {grant.pages} pages; its card makes them {block_bytes} bytes"
            )
    return None
