"""The decode side of the messenger: holds a request back until its pages have been counted in.

One thread (`pdserve-receiver`) owns all state. A request is a *job*; each attempt to get its pages from some prefill
node is a *handoff* of its own (`attempts.py`), with pages, slot and counter of its own. An attempt that failed may
outlive its job, in quarantine, until its memory is safe.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from pdserve.errors import MeetingRefused, OutOfPages, PdserveError
from pdserve.messenger.attempts import Attempts
from pdserve.messenger.mailbox import Mailbox
from pdserve.messenger.peers import Peer, PeerTable, ReceiverParts
from pdserve.messenger.target import DecodeEngine, HandoffTrace, Job, TargetHandoff
from pdserve.messenger.wire import NotMet, ToDecode
from pdserve.types import FinishReason, GenerationRequest, NodeId, PageIndex, RequestId, SequenceOutput

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
        self._waiting: deque[RequestId] = deque()  # for pages, in order
        self._next_check = 0.0
        self._peers = PeerTable(parts)
        self._mail: Mailbox[Event] = Mailbox("pdserve-receiver", lambda event: event(), self._between)
        self._attempts = Attempts(parts, self._peers, self._mail.post)
        self._attempts.outcomes = self
        self._mail.start()
        parts.pool.subscribe(lambda: self._mail.post(self._admit))

    def attach(self, engine: DecodeEngine) -> None:
        """Names the engine that decodes; before the first request."""
        self._engine = engine

    # ------------------------------------------------ from the node

    def start(self, request: GenerationRequest, prefill: NodeId) -> None:
        """Takes a request, whose prompt `prefill` shall compute."""
        self._mail.post(lambda: self._start(request, prefill))

    def cancel(self, request_id: RequestId) -> None:
        """The caller has gone: everything of the request ends, wherever it is. Unknown ids are ignored."""
        self._mail.post(lambda: self._cancel(request_id))

    def on_message(self, message: ToDecode) -> None:
        self._mail.post(lambda: self._message(message))

    def peer_lost(self, node: NodeId, reason: str) -> None:
        """A prefill node cannot be reached any more: revoke it."""
        self._mail.post(lambda: self._lose_node(node, reason))

    def trace(self, request_id: RequestId) -> HandoffTrace | None:
        """What is known of a request's last handoff; None if it had none (or long ago)."""
        return self._attempts.trace(request_id)

    @property
    def waiting(self) -> int:
        """Requests whose pages are not there yet."""
        return sum(not job.delivered for job in list(self._jobs.values()))

    @property
    def quarantined_handoffs(self) -> int:
        return self._attempts.quarantined

    @property
    def failures(self) -> dict[str, int]:
        return dict(self._attempts.failures)

    def close(self) -> None:
        """Revokes every peer; after the engine was closed."""
        self._mail.post(lambda: self._lose_all("the decode node is closing"))
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

    def _start(self, request: GenerationRequest, prefill: NodeId) -> None:
        job = Job(request, (), prefill, self._patience())
        self._jobs[request.request_id] = job
        pages = self._parts.memory.geometry.pages_for(len(job.tokens))
        if pages > self._parts.pool.total:
            reason = f"prompt needs {pages} pages, this node has {self._parts.pool.total}"
            self._end(request.request_id, FinishReason.ERROR, reason)
        elif len(job.tokens) == 1:  # nothing to prefill: no handoff
            self._deliver(job, ())
        else:
            self._queue(job)

    def _patience(self) -> float:
        return time.monotonic() + self._parts.settings.transfer_timeout_s

    def _queue(self, job: Job, *, first: bool = False) -> None:
        (self._waiting.appendleft if first else self._waiting.append)(job.request.request_id)
        self._admit()

    def _preempted(self, request: GenerationRequest, generated: tuple[int, ...]) -> None:
        job = self._jobs.get(request.request_id)
        if job is None or job.cancelled:
            self._end(request.request_id, FinishReason.ABORT, None)
            return
        self._jobs[request.request_id] = again = Job(request, generated, job.prefill, self._patience())
        self._queue(again, first=True)

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

    def _end(self, request_id: RequestId, finish: FinishReason, error: str | None) -> None:
        self._forget([request_id])
        self._parts.emit((SequenceOutput(request_id, (), finish, error),))

    def _forget(self, request_ids: list[RequestId]) -> None:
        for request_id in request_ids:
            self._jobs.pop(request_id, None)

    def _deliver(self, job: Job, pages: tuple[PageIndex, ...]) -> None:
        assert self._engine is not None
        job.delivered, job.handoff = True, None
        try:
            self._engine.submit_ready(job.request, pages, job.generated)
        except PdserveError as error:
            self._parts.pool.free(pages)
            self._end(job.request.request_id, FinishReason.ERROR, str(error))

    # ------------------------------------------------ attempts

    def _admit(self) -> None:
        """Starts handoffs in order of arrival, as pages allow. A job whose peer is not met yet steps aside."""
        while self._waiting:
            job = self._jobs.get(self._waiting[0])
            if job is None or job.cancelled or job.delivered or job.handoff is not None:
                self._waiting.popleft()
                continue
            peer = self._peers.get(job.prefill)
            if peer is not None and peer.link is not None:
                if not self._attempt(job, peer):
                    return
                self._waiting.popleft()
            else:
                self._waiting.popleft()
                job.meeting = True
                if peer is None:
                    self._meet(job.prefill)

    def _attempt(self, job: Job, peer: Peer) -> bool:
        """False when pages are short now."""
        assert self._engine is not None
        needed = self._parts.memory.geometry.pages_for(len(job.tokens) - 1)
        running = self._engine.load().running
        # Each running sequence may need a page at its next step: admitting more would only preempt them.
        if running and self._parts.pool.free_pages - needed < running:
            return False
        try:
            handoff = self._attempts.begin(job.request.request_id, job.tokens, peer)
        except OutOfPages:
            return False
        job.attempts += 1
        job.handoff = handoff
        return True

    def pages_ready(self, request_id: RequestId, pages: tuple[PageIndex, ...]) -> None:
        self._deliver(self._jobs[request_id], pages)

    def attempt_failed(self, attempt: TargetHandoff, reason: str, retryable: bool) -> None:
        job = self._jobs.get(attempt.request_id)
        if job is None or job.cancelled or job.handoff != attempt.id:
            return
        _log.warning("handoff %s of %s from %s failed: %s", attempt.id, attempt.request_id, attempt.peer, reason)
        job.handoff = None
        self._try_elsewhere(job, reason, retryable)

    def _try_elsewhere(self, job: Job, reason: str, retryable: bool) -> None:
        job.tried.add(job.prefill)
        job.reason = reason
        if not retryable or job.attempts >= self._parts.settings.attempts:
            self._end(job.request.request_id, FinishReason.ERROR, f"prefill failed: {reason}")
            return
        job.reroute_until = job.reroute_until or time.monotonic() + self._parts.settings.failover_timeout_s
        self._ask_reroute(job)

    def _ask_reroute(self, job: Job) -> None:
        job.reroute_at = None
        request_id = job.request.request_id

        def reply(node: NodeId | None) -> None:
            self._mail.post(lambda: self._rerouted(request_id, node))

        self._parts.reroute(request_id, frozenset(job.tried), reply)

    def _rerouted(self, request_id: RequestId, node: NodeId | None) -> None:
        job = self._jobs.get(request_id)
        if job is None or job.cancelled or job.delivered:
            return
        if node is not None:
            job.prefill, job.give_up_at = node, self._patience()
            self._queue(job)
        elif job.reroute_until is not None and time.monotonic() > job.reroute_until:
            error = f"prefill failed: {job.reason}; no other prefill node became ready"
            self._end(request_id, FinishReason.ERROR, error)
        else:
            job.tried = set()  # a node that was restarted deserves another try
            job.reroute_at = time.monotonic() + REROUTE_PAUSE_S

    # ------------------------------------------------ peers

    def _meet(self, node: NodeId) -> None:
        try:
            self._peers.begin(node, lambda peer, answer: self._mail.post(partial(self._met, peer, answer)))
        except PdserveError as error:
            self._meeting_ended(node, str(error))

    def _met(self, peer: Peer, answer: object) -> None:
        try:
            if not self._peers.complete(peer, answer):
                return
        except MeetingRefused as error:
            self._meeting_ended(peer.node, str(error))
        else:
            self._meeting_ended(peer.node, None)

    def _meeting_ended(self, node: NodeId, failure: str | None) -> None:
        if failure is not None:
            _log.warning("meeting %s failed: %s", node, failure)
        for job in [j for j in self._jobs.values() if j.meeting and j.prefill == node]:
            job.meeting = False
            if failure is None:
                self._queue(job)
            else:
                job.attempts += 1
                self._try_elsewhere(job, f"could not meet {node}: {failure}", retryable=True)

    def _message(self, message: ToDecode) -> None:
        if not isinstance(message, NotMet):
            self._attempts.on_message(message)
            return
        for peer in self._peers.all():
            if peer.incarnation == message.target:
                self.revoke(peer, message.reason)

    def revoke(self, peer: Peer, reason: str) -> None:
        """After this nothing of the peer can land, and all memory that it could have hit is safe."""
        _log.warning("revoking %s: %s", peer.node, reason)
        met = peer.link is not None
        self._peers.revoke(peer)
        self._attempts.revoked(peer, reason)
        if not met:
            self._meeting_ended(peer.node, reason)

    def _lose_node(self, node: NodeId, reason: str) -> None:
        peer = self._peers.get(node)
        if peer is not None:
            self.revoke(peer, reason)

    def _lose_all(self, reason: str) -> None:
        for peer in self._peers.all():
            self.revoke(peer, reason)

    # ------------------------------------------------ between events

    def _between(self) -> float:
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + CHECK_S
            self._check(now)
        return CHECK_S if self._jobs or len(self._attempts) else 0.2

    def _check(self, now: float) -> None:
        for peer in self._peers.ended():
            self.revoke(peer, "its process has ended")
        for peer in self._peers.unanswered(now):
            self.revoke(peer, "it did not answer a meeting in time")
        self._attempts.check(now)
        for job in list(self._jobs.values()):
            if job.reroute_at is not None and now > job.reroute_at:
                self._ask_reroute(job)
            elif not job.delivered and job.handoff is None and now > job.give_up_at:
                error = "no pages became free in time: the node is overloaded"
                self._end(job.request.request_id, FinishReason.ERROR, error)
