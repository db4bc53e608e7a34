"""The decode side of the messenger: holds a request back until its pages have been counted in.

One thread (`pdserve-receiver`) owns all state. A request is a *job*; each attempt to get its pages from some prefill
node is a *handoff* of its own (`attempts.py`), with pages, slot and counter of its own. An attempt that failed may
outlive its job, in quarantine, until its memory is safe.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from functools import partial

from pdserve.errors import MeetingRefused, OutOfPages
from pdserve.messenger.attempts import Attempts
from pdserve.messenger.line import Intake
from pdserve.messenger.mailbox import Mailbox
from pdserve.messenger.peers import Peer, PeerTable, ReceiverParts
from pdserve.messenger.target import DecodeEngine, HandoffTrace, Job, TargetHandoff
from pdserve.messenger.wire import Accept, Done, NotMet, Quiesced, Reject, ToDecode
from pdserve.types import FinishReason, GenerationRequest, Incarnation, NodeId, PageIndex, RequestId, SequenceOutput

_log = logging.getLogger(__name__)

CHECK_S = 0.02
REROUTE_PAUSE_S = 0.5

Event = Callable[[], None]


class Receiver:
    """Implements `DecodeHooks`; its public methods are thread-safe and return at once."""

    def __init__(self, parts: ReceiverParts) -> None:
        self._parts = parts
        self._engine: DecodeEngine | None = None
        self._jobs: dict[RequestId, Job] = {}
        self._arrivals = 0
        self._waiting: list[Job] = []  # for pages, by arrival
        self._next_check = 0.0
        self._intake: Intake[ToDecode] = Intake(Accept, Reject, Quiesced, Done, NotMet)
        self._peers = PeerTable(parts, lambda node, data: self._mail.post(lambda: self._read(node, data)))
        self._mail: Mailbox[Event] = Mailbox("pdserve-receiver", lambda event: event(), self._between)
        self._attempts = Attempts(parts, self._peers, self._mail.post)
        self._attempts.outcomes = self
        self._mail.start()
        self._unsubscribe = parts.pool.subscribe(lambda: self._mail.post(self._admit))

    def attach(self, engine: DecodeEngine) -> None:
        """Names the engine that decodes; before the first request."""
        self._engine = engine

    # ------------------------------------------------ from the node

    def start(self, request: GenerationRequest, prefill: NodeId, *, only_there: bool = False) -> None:
        """Takes a request, whose prompt `prefill` shall compute; with `only_there`, that node or none, and once."""
        self._mail.post(lambda: self._start(request, prefill, only_there))

    def cancel(self, request_id: RequestId) -> None:
        """The caller has gone: everything of the request ends, wherever it is. Unknown ids are ignored."""
        self._mail.post(lambda: self._cancel(request_id))

    def on_message(self, message: ToDecode) -> None:
        """One that has come aside of the links."""
        self._mail.post(lambda: self._message(message))

    def peer_lost(self, node: NodeId, reason: str) -> None:
        """A prefill node cannot be reached any more: revoke it."""
        self._mail.post(lambda: self._lose_node(node, reason))

    def trace(self, request_id: RequestId) -> HandoffTrace | None:
        """What is known of a request's last handoff; None if it had none (or long ago)."""
        return self._attempts.trace(request_id)

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
        return sum(not job.delivered for job in list(self._jobs.values()))

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
            self._mail.post(lambda: self._forget(ended))

    def preempted(self, request: GenerationRequest, generated: tuple[int, ...]) -> None:
        self._mail.post(lambda: self._preempted(request, generated))

    # ------------------------------------------------ jobs

    def _start(self, request: GenerationRequest, prefill: NodeId, only_there: bool = False) -> None:
        if request.request_id in self._jobs:
            _log.error("request %s is here already: the second one is ignored", request.request_id)
            return
        self._arrivals += 1
        job = Job(request, (), prefill, self._arrivals, only_there=only_there)
        self._jobs[request.request_id] = job
        pages = self._parts.memory.geometry.pages_for(len(job.tokens))
        if pages > self._parts.pool.total:
            reason = f"prompt needs {pages} pages, this node has {self._parts.pool.total}"
            self._end(request.request_id, FinishReason.ERROR, reason)
        elif len(job.tokens) == 1:  # nothing to prefill: no handoff
            self._deliver(job, ())
        else:
            self._queue(job)

    def _preempted(self, request: GenerationRequest, generated: tuple[int, ...]) -> None:
        job = self._jobs.get(request.request_id)
        if job is None or job.cancelled:
            self._end(request.request_id, FinishReason.ABORT, None)
            return
        self._jobs[request.request_id] = again = Job(request, generated, job.prefill, job.arrival)
        self._queue(again)

    def _cancel(self, request_id: RequestId) -> None:
        assert self._engine is not None
        job = self._jobs.get(request_id)
        if job is None:
            return
        job.cancelled = True
        if job.delivered:
            # If the engine preempts it at this moment, `_preempted` finds the mark.
            self._engine.cancel(request_id)
            return
        self._attempts.give_up(job.handoff, "cancelled by the caller")
        self._end(request_id, FinishReason.ABORT, None)

    def _end(
        self, request_id: RequestId, finish: FinishReason, error: str | None, *, unavailable: bool = False
    ) -> None:
        self._forget([request_id])
        self._parts.emit((SequenceOutput(request_id, (), finish, error, unavailable),))

    def _forget(self, request_ids: list[RequestId]) -> None:
        for request_id in request_ids:
            self._jobs.pop(request_id, None)

    def _deliver(self, job: Job, pages: tuple[PageIndex, ...]) -> None:
        assert self._engine is not None
        job.delivered, job.handoff = True, None
        try:
            self._engine.submit_ready(job.request, pages, job.generated)
        except Exception as error:  # then the pages are still ours
            self._parts.pool.free(pages)
            self._end(job.request.request_id, FinishReason.ERROR, str(error))

    # ------------------------------------------------ attempts

    def _queue(self, job: Job) -> None:
        """In line for pages; first of all its prefill node must be met."""
        peer = self._peers.get(job.prefill)
        if peer is not None and peer.link is not None:
            job.reroute_until = None
            job.give_up_at = job.give_up_at or time.monotonic() + self._parts.settings.transfer_timeout_s
            bisect.insort(self._waiting, job, key=lambda waiting: waiting.arrival)
            self._admit()
            return
        job.meeting = True
        if peer is None:
            self._meet(job.prefill)

    def _admit(self) -> None:
        """Starts handoffs in order of arrival, as pages allow."""
        while self._waiting:
            job = self._waiting[0]
            peer = self._peers.get(job.prefill)
            if self._jobs.get(job.request.request_id) is not job or job.cancelled:
                self._waiting.pop(0)
            elif peer is None or peer.link is None:  # lost while it waited
                self._queue(self._waiting.pop(0))
            elif self._attempt(job, peer):
                self._waiting.pop(0)
            else:
                return

    def _attempt(self, job: Job, peer: Peer) -> bool:
        """False when pages are short now."""
        assert self._engine is not None
        # Each running sequence may need a page at its next step: admitting more would only preempt them.
        spare = self._engine.load().running
        try:
            handoff = self._attempts.begin(job.request.request_id, job.tokens, peer, leave_free=spare)
        except OutOfPages:
            return False
        job.attempts += 1
        job.handoff, job.give_up_at = handoff, None
        return True

    def pages_ready(self, attempt: TargetHandoff) -> None:
        job = self._jobs.get(attempt.request_id)
        assert job is not None and job.handoff == attempt.id  # whatever ends a job gives its attempt up first
        self._deliver(job, attempt.pages)

    def attempt_failed(self, attempt: TargetHandoff, reason: str, retryable: bool) -> None:
        job = self._jobs.get(attempt.request_id)
        if job is None or job.cancelled or job.handoff != attempt.id:
            return
        _log.warning("handoff %s of %s from %s failed: %s", attempt.id, attempt.request_id, attempt.peer, reason)
        job.handoff = None
        self._try_elsewhere(job, reason, retryable)

    def _try_elsewhere(self, job: Job, reason: str, retryable: bool = True) -> None:
        job.tried.add(job.prefill)
        job.reason, job.give_up_at = reason, None
        if not retryable or job.only_there or job.attempts >= self._parts.settings.attempts:
            error = f"prefill failed: {reason}"
            self._end(job.request.request_id, FinishReason.ERROR, error, unavailable=retryable)
            return
        job.reroute_until = job.reroute_until or time.monotonic() + self._parts.settings.failover_timeout_s
        self._ask_reroute(job)

    def _ask_reroute(self, job: Job) -> None:
        job.reroute_at, job.rerouting = None, True

        def reply(node: NodeId | None) -> None:
            self._mail.post(lambda: self._rerouted(job, node))

        try:
            self._parts.reroute(job.request.request_id, frozenset(job.tried), reply)
        except Exception as error:
            _log.warning("cannot ask for another prefill node: %s", error)
            reply(None)

    def _rerouted(self, job: Job, node: NodeId | None) -> None:
        if self._jobs.get(job.request.request_id) is not job or job.cancelled or not job.rerouting:
            return
        job.rerouting = False
        if node is not None:
            job.prefill = node
            self._queue(job)
        else:
            job.tried = set()  # a node that was restarted deserves another try
            job.reroute_at = time.monotonic() + REROUTE_PAUSE_S

    # ------------------------------------------------ peers

    def _meet(self, node: NodeId) -> None:
        number = self._attempts.next_number()
        try:
            self._peers.begin(node, number, lambda peer, answer: self._mail.post(partial(self._met, peer, answer)))
        except Exception as error:
            self._meeting_failed(node, error)

    def _met(self, peer: Peer, answer: object) -> None:
        try:
            if not self._peers.complete(peer, answer):
                return
        except Exception as error:
            self._meeting_failed(peer.node, error)
            return
        for job in self._end_meeting(peer.node):
            self._queue(job)

    def _meeting_failed(self, node: NodeId, error: Exception) -> None:
        """A refusal counts as an attempt. A node that cannot be reached may be starting: time alone bounds that."""
        _log.warning("meeting %s failed: %s", node, error)
        for job in self._end_meeting(node):
            job.attempts += isinstance(error, MeetingRefused)
            self._try_elsewhere(job, f"could not meet {node}: {error}")

    def _end_meeting(self, node: NodeId) -> list[Job]:
        """The jobs that have waited for it."""
        jobs = [job for job in self._jobs.values() if job.meeting and job.prefill == node]
        for job in jobs:
            job.meeting = False
        return jobs

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

        Where the transport cannot promise that, or closing the link has failed, such memory is held until the peer's
        process has `ended`.
        """
        _log.warning("revoking %s: %s", peer.node, reason)
        peer.offered.close()
        met, safe = peer.link is not None, ended or (peer.transport.revokes and peer.offered.revoked)
        self._peers.revoke(peer, watch=not safe)
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
        self._attempts.release_held(incarnation)

    def _replace(self, node: NodeId, incarnation: Incarnation) -> None:
        peer = self._peers.get(node)
        if peer is not None and peer.incarnation not in (None, incarnation):
            self.revoke(peer, "it was restarted")

    def _close(self) -> None:
        for job in list(self._jobs.values()):
            if not job.delivered:
                self._end(job.request.request_id, FinishReason.ABORT, "the decode node is closing")
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
        for job in list(self._jobs.values()):
            if not job.delivered and job.handoff is None:
                self._check_job(job, now)
        self._admit()  # what kept the first one waiting may have ended without freeing a page

    def _check_job(self, job: Job, now: float) -> None:
        if job.reroute_until is not None and now > job.reroute_until:
            patience = self._parts.settings.failover_timeout_s
            error = f"prefill failed: {job.reason}; no other prefill node became ready within {patience:g} s"
            self._end(job.request.request_id, FinishReason.ERROR, error, unavailable=True)
        elif job.reroute_at is not None and now > job.reroute_at:
            self._ask_reroute(job)
        elif job.give_up_at is not None and now > job.give_up_at:
            error = "no pages became free in time: the node is overloaded"
            self._end(job.request.request_id, FinishReason.ERROR, error, unavailable=True)
