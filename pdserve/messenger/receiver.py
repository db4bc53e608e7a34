"""The decode side of the messenger: holds a request back until its pages have been counted in.

One thread (`pdserve-receiver`) owns all state. A request is a *job*; each attempt to get its pages from some prefill
node is a *handoff* of its own (`attempts.py`), with pages, slot and counter of its own. An attempt that failed may
outlive its job (`jobs.py`), in quarantine, until its memory is safe.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from pdserve.errors import MeetingRefused
from pdserve.messenger.attempts import Attempts
from pdserve.messenger.jobs import Jobs
from pdserve.messenger.line import Intake
from pdserve.messenger.mailbox import Mailbox
from pdserve.messenger.peers import Peer, PeerTable, ReceiverParts
from pdserve.messenger.target import DecodeEngine, HandoffTrace
from pdserve.messenger.wire import Accept, Done, MeetReply, NotMet, Quiesced, Reject, ToDecode
from pdserve.types import GenerationRequest, Incarnation, NodeId, RequestId, SequenceOutput

_log = logging.getLogger(__name__)

CHECK_S = 0.02
ASK_AGAIN_S = 5.0  # before a prefill node is met for no other reason than that it closes its side

Event = Callable[[], None]


class Receiver:
    """Implements `DecodeHooks`; its public methods are thread-safe and return at once."""

    def __init__(self, parts: ReceiverParts) -> None:
        self._parts = parts
        self._next_check = self._next_ask = 0.0
        self._intake: Intake[ToDecode] = Intake(Accept, Reject, Quiesced, Done, NotMet)
        self._peers = PeerTable(parts, lambda node, data: self._mail.post(lambda: self._read(node, data)))
        self._mail: Mailbox[Event] = Mailbox("pdserve-receiver", lambda event: event(), self._between)
        self._jobs = Jobs(parts, self._peers, self._mail.post)
        self._attempts = Attempts(parts, self._peers, self._mail.post)
        self._jobs.attempts, self._jobs.meet = self._attempts, self._meet
        self._attempts.outcomes, self._attempts.revoke = self._jobs, self.revoke
        self._mail.start()
        self._unsubscribe = parts.pool.subscribe(lambda: self._mail.post(self._jobs.admit))

    def attach(self, engine: DecodeEngine) -> None:
        """Names the engine that decodes; before the first request."""
        self._jobs.attach(engine)

    # ------------------------------------------------ from the node

    def start(self, request: GenerationRequest, prefill: NodeId, *, only_there: bool = False) -> None:
        """Takes a request, whose prompt `prefill` shall compute; with `only_there`, that node or none, and once."""
        self._mail.post(lambda: self._jobs.start(request, prefill, only_there))

    def cancel(self, request_id: RequestId) -> None:
        """The caller has gone: everything of the request ends, wherever it is. Unknown ids are ignored."""
        self._mail.post(lambda: self._jobs.cancel(request_id))

    def on_message(self, message: ToDecode) -> None:
        """One that has come aside of the links."""
        self._mail.post(lambda: self._message(message))

    def peer_lost(self, node: NodeId, reason: str) -> None:
        """A prefill node cannot be reached any more: revoke it."""
        self._mail.post(lambda: self._lose_node(node, reason))

    def trace(self, request_id: RequestId) -> HandoffTrace | None:
        """What is known of a request's last handoff; None if it had none (or long ago)."""
        return self._attempts.traces.get(request_id)

    def peer_replaced(self, node: NodeId, incarnation: Incarnation) -> None:
        """Another incarnation lives there now: what was met before is revoked."""
        self._mail.post(lambda: self._replace(node, incarnation))

    @property
    def met(self) -> frozenset[Incarnation]:
        """Prefill nodes whose link stands: not those that were revoked since, for whatever reason."""
        return frozenset(peer.incarnation for peer in self._peers.all() if peer.link and peer.incarnation is not None)

    @property
    def waiting(self) -> int:
        """Requests whose pages are not there yet."""
        return self._jobs.waiting

    @property
    def handoffs(self) -> int:
        """Attempts whose pages and slots are pinned, those in quarantine included."""
        return len(self._attempts)

    @property
    def quarantined_handoffs(self) -> int:
        return self._attempts.quarantined

    @property
    def failures(self) -> dict[str, int]:
        return dict(self._attempts.failures)

    @property
    def unreadable(self) -> int:
        """Messages dropped because they were none of ours."""
        return self._intake.unreadable

    def close(self) -> None:
        """Ends what still waits and revokes every peer; after the engine was closed. Idempotent."""
        self._unsubscribe()
        self._mail.post(self._close)
        self._mail.close()
        self._peers.close()

    # ------------------------------------------------ from the engine (DecodeHooks)

    def step_outputs(self, outputs: tuple[SequenceOutput, ...]) -> None:
        self._parts.emit(outputs)
        ended = [output.request_id for output in outputs if output.finish is not None]
        if ended:
            self._mail.post(lambda: self._jobs.forget(ended))

    def preempted(self, request: GenerationRequest, generated: tuple[int, ...]) -> None:
        self._mail.post(lambda: self._jobs.preempted(request, generated))

    # ------------------------------------------------ peers

    def _meet(self, node: NodeId) -> None:
        number = self._attempts.next_number()
        try:
            self._peers.begin(node, number, lambda peer, answer: self._mail.post(partial(self._met, peer, answer)))
        except Exception as error:
            self._meeting_failed(node, error)

    def _met(self, peer: Peer, answer: object) -> None:
        if isinstance(answer, MeetReply):  # which may come too late for the meeting, and is true all the same
            self._attempts.closed_there(answer.card.incarnation, answer.closed_through)
        try:
            if not self._peers.complete(peer, answer):
                return
        except Exception as error:
            self._meeting_failed(peer.node, error)
            return
        self._jobs.met(peer.node)

    def _meeting_failed(self, node: NodeId, error: Exception) -> None:
        _log.warning("meeting %s failed: %s", node, error)
        self._jobs.not_met(node, str(error), refused=isinstance(error, MeetingRefused))

    def _read(self, node: NodeId, data: bytes) -> None:
        message = self._intake.read(data, node)
        if message is not None:
            self._message(message)

    def _message(self, message: ToDecode) -> None:
        if not isinstance(message, NotMet):
            self._attempts.on_message(message)
        elif message.id.decode == self._parts.card.incarnation:
            peer = self._attempts.peer_of(message.id) or self._peers.met_as(message.id.number)
            # One that has not answered yet has closed its link before we could meet.
            if peer is not None and peer.incarnation in (None, message.target):
                self.revoke(peer, message.reason)

    def revoke(self, peer: Peer, reason: str, *, ended: bool = False) -> None:
        """After this nothing of the peer can land, and all memory that it could have hit is safe.

        Where the transport cannot promise that, or closing the link has failed, such memory is held until the peer has
        closed its side, which it does before it meets us again, or its process has `ended`.
        """
        _log.warning("revoking %s: %s", peer.node, reason)
        peer.offered.close()
        met, safe = peer.link is not None, ended or (peer.transport.revokes and peer.offered.revoked)
        self._peers.revoke(peer, watch=not safe)
        self._next_ask = time.monotonic() + ASK_AGAIN_S
        if met:
            self._attempts.revoked(peer, reason, safe=safe)
        else:
            self._meeting_failed(peer.node, ConnectionError(reason))

    def _lose_node(self, node: NodeId, reason: str) -> None:
        peer = self._peers.get(node)
        if peer is not None:
            self.revoke(peer, reason)

    def _end_process(self, incarnation: Incarnation) -> None:
        peer = self._peers.of(incarnation)
        if peer is not None:
            self.revoke(peer, "its process has ended", ended=True)
        self._attempts.process_ended(incarnation)

    def _replace(self, node: NodeId, incarnation: Incarnation) -> None:
        peer = self._peers.get(node)
        if peer is not None and peer.incarnation not in (None, incarnation):
            self.revoke(peer, "it was restarted")

    def _close(self) -> None:
        self._jobs.close()
        for peer in self._peers.all():
            self.revoke(peer, "the decode node is closing")

    # ------------------------------------------------ between events

    def _between(self) -> float:
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + CHECK_S
            self._check(now)
        return CHECK_S if self._jobs or len(self._attempts) else 0.2

    def _check(self, now: float) -> None:
        for incarnation in self._peers.ended():
            self._end_process(incarnation)
        for peer, fault in self._peers.broken():
            self.revoke(peer, f"its link has failed: {fault}")
        for peer in self._peers.unanswered(now):
            self.revoke(peer, "it did not answer a meeting in time")
        self._attempts.check(now)
        self._jobs.check(now)
        if now >= self._next_ask:
            self._next_ask = now + ASK_AGAIN_S
            self._ask_for_closing()

    def _ask_for_closing(self) -> None:
        """Meets those that may still write to what we have taken from them: nothing is to be held for ever."""
        for node, incarnation in self._attempts.may_still_write.items():
            card = self._parts.card_of(node)
            if self._peers.get(node) is None and card is not None and card.incarnation == incarnation:
                self._meet(node)
