"""A decode node's handoffs: memory pinned, counters armed, messages exchanged, and every page accounted for.

Owned by the receiver's thread. What becomes of the requests is the receiver's business: it is told through `Outcomes`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from pdserve.errors import OutOfPages
from pdserve.messenger.handoff import decode as h
from pdserve.messenger.held import HeldMemory
from pdserve.messenger.peers import Peer, PeerTable, ReceiverParts
from pdserve.messenger.slots import SLOTS, SlotTable
from pdserve.messenger.target import TargetHandoff
from pdserve.messenger.traces import Traces
from pdserve.messenger.wire import (
    Accept,
    Cancel,
    Done,
    HandoffId,
    HandoffRequest,
    Quiesced,
    Reject,
    ToPrefill,
)
from pdserve.types import Incarnation, NodeId, RequestId
from policies.sharding import expected_count, pages_sent
from transport.api import Imm

CANCEL_PATIENCE_S = 2.0  # before a Cancel is repeated
CANCELS = 3  # then the peer is revoked

_log = logging.getLogger(__name__)


class Outcomes(Protocol):
    """Who is told what became of an attempt."""

    def pages_ready(self, attempt: TargetHandoff) -> None: ...

    def attempt_failed(self, attempt: TargetHandoff, reason: str, retryable: bool) -> None: ...


class Attempts:
    """`outcomes`, and `revoke`, which ends a peer's link, are set before the first attempt."""

    def __init__(self, parts: ReceiverParts, peers: PeerTable, post: Callable[[Callable[[], None]], None]) -> None:
        self._parts = parts
        self._peers = peers
        self._post = post
        self._slots = SlotTable(first=parts.replica.number * SLOTS)
        self._held = HeldMemory(parts.pool, self._slots)
        self._handoffs: dict[HandoffId, TargetHandoff] = {}
        self.traces = Traces()
        self._number = 0
        self.outcomes: Outcomes | None = None
        self.revoke: Callable[[Peer, str], None] | None = None
        self.failures = {"transfer": 0, "expired": 0, "rejected": 0, "peer_lost": 0}

    def __len__(self) -> int:
        return len(self._handoffs) + len(self._held)

    @property
    def quarantined(self) -> int:
        return sum(entry.machine.state in h.HELD for entry in list(self._handoffs.values())) + len(self._held)

    def begin(self, request_id: RequestId, tokens: tuple[int, ...], peer: Peer, *, leave_free: int) -> HandoffId:
        """Pins pages and a slot, arms the counter, and only then asks; `leave_free` pages stay for others.

        Raises OutOfPages when either is short now.
        """
        if not self._slots.free:
            raise OutOfPages("all immediate slots are taken")
        count = self._expected(len(tokens), peer)
        needed = self._parts.memory.geometry.pages_for(len(tokens) - 1)
        pages = self._parts.pool.allocate(needed, leave_free=leave_free)
        entry = TargetHandoff(
            id=HandoffId(self._parts.card.incarnation, self.next_number()),
            request_id=request_id,
            peer=peer.node,
            pages=pages,
            imm=self._slots.take(),
            tokens=tokens,
            deadline=time.monotonic() + self._parts.settings.request_timeout_s,
        )
        self._handoffs[entry.id] = entry
        size_bytes = needed * self._parts.memory.geometry.page_bytes * self._parts.card.parallel.tp
        self.traces.begin(entry, peer, count, size_bytes)
        self._feed(entry, h.Allotted(count))
        return entry.id

    def next_number(self) -> int:
        """Handoffs and meetings draw from one sequence, so that a meeting tells which handoffs are older."""
        self._number += 1
        return self._number

    def peer_of(self, handoff: HandoffId) -> Peer | None:
        """Who works at a handoff that is under way."""
        entry = self._handoffs.get(handoff)
        return None if entry is None else self._peers.get(entry.peer)

    def _expected(self, prompt_tokens: int, peer: Peer) -> int:
        card = self._parts.card
        sent = pages_sent(prompt_tokens - 1, card.page_size)
        return expected_count([(group, sent) for group in card.groups], peer.parallel, card.parallel, card.page_size)

    def give_up(self, handoff: HandoffId | None, reason: str) -> None:
        """The request is gone: its memory stays in quarantine until it is safe."""
        entry = None if handoff is None else self._handoffs.get(handoff)
        if entry is not None:
            self._feed(entry, h.GiveUp(reason, retryable=False))

    def revoked(self, peer: Peer, reason: str, *, safe: bool) -> None:
        """The peer's link is closed and drained; unless `safe`, its writes may land until its side is closed too."""
        self.failures["peer_lost"] += 1
        why = f"{peer.node} was lost: {reason}"
        for entry in [e for e in self._handoffs.values() if e.peer == peer.node]:
            if safe:
                self._feed(entry, h.PeerRevoked(why))
            else:
                self._hold(entry, peer, why)

    def _hold(self, entry: TargetHandoff, peer: Peer, why: str) -> None:
        """The attempt is given up, and nobody is left to answer a cancel: its memory waits until the peer is done."""
        assert peer.incarnation is not None
        self._feed(entry, h.GiveUp(why, retryable=True))
        self._disarm(entry)
        self._held.hold(peer.node, peer.incarnation, peer.number, (entry.pages, entry.imm))
        _log.warning("%d pages of %s stay quarantined: its process may still write to them", len(entry.pages), entry.id)

    @property
    def may_still_write(self) -> dict[NodeId, Incarnation]:
        """Prefill nodes that were revoked, and may write all the same until they have closed their side."""
        return self._held.peers

    def process_ended(self, incarnation: Incarnation) -> None:
        self._held.release(incarnation)

    def closed_there(self, incarnation: Incarnation, through: int) -> None:
        """That prefill node has closed its side of all meetings up to this number."""
        freed = self._held.closed(incarnation, through, time.monotonic())
        if freed:
            _log.info("%d handoffs end their quarantine: their prefill node has closed its side", freed)

    # ------------------------------------------------ messages

    def on_message(self, message: Accept | Reject | Quiesced | Done) -> None:
        if isinstance(message, Done):
            self.traces.done(message)  # bookkeeping only: readiness comes from the count alone
            return
        entry = self._handoffs.get(message.id)
        peer = None if entry is None else self._peers.get(entry.peer)
        if entry is None or peer is None or peer.incarnation != message.source:
            return  # long over, or from an incarnation that was revoked
        match message:
            case Accept():
                if entry.machine.state is h.DecodeState.REQUESTED:  # a late one changes no other deadline
                    entry.deadline = time.monotonic() + self._parts.settings.transfer_timeout_s
                self._feed(entry, h.Accepted())
            case Reject(reason=reason, retryable=retryable):
                self.failures["rejected"] += entry.machine.state not in h.HELD
                self._feed(entry, h.Rejected(reason, retryable))
            case Quiesced(posted=posted, reason=reason):
                self.failures["transfer"] += entry.machine.state not in h.HELD
                received = 0 if entry.armed is None else entry.armed.received(entry.imm)
                self._feed(entry, h.QuiescedAt(posted, received, reason))

    # ------------------------------------------------ machine in, work out

    def _feed(self, entry: TargetHandoff, event: h.DecodeEvent) -> None:
        for instruction in entry.machine.handle(event):
            self._execute(entry, instruction)

    def _execute(self, entry: TargetHandoff, instruction: h.DecodeInstruction) -> None:
        assert self.outcomes is not None and self.revoke is not None
        pool, peer = self._parts.pool, self._peers.get(entry.peer)
        match instruction:
            case h.ArmCounter(expected):
                assert peer is not None
                entry.armed = peer.immediates
                entry.armed.arm(entry.imm, expected, partial(self._full, entry.id))
            case h.SendRequest():
                assert peer is not None
                self._send(peer, self._request(entry, peer))
            case h.SendCancel():
                self._send_cancel(entry, peer)
            case h.Retarget(expected):
                assert entry.armed is not None
                entry.deadline = time.monotonic() + CANCELS * CANCEL_PATIENCE_S
                entry.armed.retarget(entry.imm, expected, partial(self._full, entry.id))
            case h.QuarantinePages():
                pool.quarantine(entry.pages)
            case h.Free(quarantined):
                self._retire(entry)
                (pool.release if quarantined else pool.free)(entry.pages)
            case h.Deliver():
                self._ready(entry)
            case h.Fail(reason, retryable):
                self.outcomes.attempt_failed(entry, reason, retryable)
            case h.RevokePeer():
                if peer is not None:
                    self.revoke(peer, "it does not answer a cancel")

    def _request(self, entry: TargetHandoff, peer: Peer) -> HandoffRequest:
        assert peer.incarnation is not None
        return HandoffRequest(
            id=entry.id,
            sender=self._parts.card.node_id,
            source=self._parts.card.incarnation,
            target=peer.incarnation,
            prompt=entry.tokens,
            present_pages=0,
            pages=entry.pages,
            imm=entry.imm,
            timeout_s=self._parts.settings.transfer_timeout_s,
        )

    def _send_cancel(self, entry: TargetHandoff, peer: Peer | None) -> None:
        entry.deadline, entry.cancels = time.monotonic() + CANCEL_PATIENCE_S, entry.cancels + 1
        if peer is not None and peer.incarnation is not None:
            card = self._parts.card
            self._send(peer, Cancel(entry.id, card.node_id, card.incarnation, peer.incarnation))

    def _send(self, peer: Peer, message: ToPrefill) -> None:
        try:
            peer.send(message)
        except Exception as error:  # as if it had been lost on the way: deadlines see to that
            _log.warning("%s to %s was not sent: %s", type(message).__name__, peer.node, error)

    def _full(self, handoff: HandoffId, imm: Imm) -> None:
        at = time.monotonic()
        self._post(lambda: self._counted(handoff, at))

    def _counted(self, handoff: HandoffId, at: float) -> None:
        entry = self._handoffs.get(handoff)
        if entry is not None:
            entry.full_at = at
            self._feed(entry, h.CountFull())

    def _retire(self, entry: TargetHandoff) -> int:
        """Stops counting and gives the slot back; returns what was counted."""
        counted = self._disarm(entry)
        self._slots.give_back(entry.imm)
        return counted

    def _disarm(self, entry: TargetHandoff) -> int:
        counted = 0 if entry.armed is None else entry.armed.disarm(entry.imm)
        entry.armed = None
        del self._handoffs[entry.id]
        return counted

    def _ready(self, entry: TargetHandoff) -> None:
        assert self.outcomes is not None
        self.traces.ready(entry, self._retire(entry))
        self.outcomes.pages_ready(entry)

    # ------------------------------------------------ deadlines

    def check(self, now: float) -> None:
        self._held.check(now)
        for entry in list(self._handoffs.values()):
            if entry.id in self._handoffs:  # not freed by what another entry's deadline caused
                self._check(entry, now)

    def _check(self, entry: TargetHandoff, now: float) -> None:
        state = entry.machine.state
        unseen = state in (h.DecodeState.REQUESTED, h.DecodeState.ACCEPTED)
        if unseen and entry.armed is not None and entry.armed.received(entry.imm):
            entry.deadline = max(entry.deadline, now + self._parts.settings.transfer_timeout_s)
            self._feed(entry, h.ImmediatesSeen())
        if now <= entry.deadline:
            return
        if state in h.HELD:
            entry.deadline = now + CANCEL_PATIENCE_S
            final = entry.cancels >= CANCELS or state is h.DecodeState.QUARANTINED
            self._feed(entry, h.CancelUnanswered(final))
        else:
            self.failures["expired"] += 1
            self._feed(entry, h.GiveUp(f"no pages from {entry.peer} in time ({state})", retryable=True))
