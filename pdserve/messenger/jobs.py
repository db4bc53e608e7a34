"""A decode node's requests until they decode: in line for pages, one attempt after another, or for another P node.

Owned by the receiver's thread. Meeting a prefill node is the receiver's business: it is asked through `meet`.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable

from pdserve.errors import OutOfPages
from pdserve.messenger.attempts import Attempts
from pdserve.messenger.peers import Peer, PeerTable, ReceiverParts
from pdserve.messenger.target import DecodeEngine, Job, TargetHandoff
from pdserve.types import FinishReason, GenerationRequest, NodeId, PageIndex, RequestId, SequenceOutput

REROUTE_PAUSE_S = 0.5

_log = logging.getLogger(__name__)


class Jobs:
    """`attempts` and `meet`, which opens a link to a prefill node, are set before the first request."""

    def __init__(self, parts: ReceiverParts, peers: PeerTable, post: Callable[[Callable[[], None]], None]) -> None:
        self._parts = parts
        self._peers = peers
        self._post = post
        self._jobs: dict[RequestId, Job] = {}
        self._arrivals = 0
        self._waiting: list[Job] = []  # for pages, by arrival
        self._engine: DecodeEngine | None = None
        self.attempts: Attempts | None = None
        self.meet: Callable[[NodeId], None] | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    def attach(self, engine: DecodeEngine) -> None:
        self._engine = engine

    @property
    def waiting(self) -> int:
        """Requests whose pages are not there yet. From any thread."""
        return sum(not job.delivered for job in list(self._jobs.values()))

    # ------------------------------------------------ how they come and go

    def start(self, request: GenerationRequest, prefill: NodeId, only_there: bool) -> None:
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

    def preempted(self, request: GenerationRequest, generated: tuple[int, ...]) -> None:
        job = self._jobs.get(request.request_id)
        if job is None or job.cancelled:
            self._end(request.request_id, FinishReason.ABORT, None)
            return
        self._jobs[request.request_id] = again = Job(request, generated, job.prefill, job.arrival)
        self._queue(again)

    def cancel(self, request_id: RequestId) -> None:
        assert self._engine is not None and self.attempts is not None
        job = self._jobs.get(request_id)
        if job is None:
            return
        job.cancelled = True
        if job.delivered:
            # If the engine preempts it at this moment, `preempted` finds the mark.
            self._engine.cancel(request_id)
            return
        self.attempts.give_up(job.handoff, "cancelled by the caller")
        self._end(request_id, FinishReason.ABORT, None)

    def forget(self, request_ids: list[RequestId]) -> None:
        """The engine has ended them."""
        for request_id in request_ids:
            self._jobs.pop(request_id, None)

    def close(self) -> None:
        """Ends what still waits."""
        for job in list(self._jobs.values()):
            if not job.delivered:
                self._end(job.request.request_id, FinishReason.ABORT, "the decode node is closing")

    def _end(
        self, request_id: RequestId, finish: FinishReason, error: str | None, *, unavailable: bool = False
    ) -> None:
        self.forget([request_id])
        self._parts.emit((SequenceOutput(request_id, (), finish, error, unavailable),))

    def _deliver(self, job: Job, pages: tuple[PageIndex, ...]) -> None:
        assert self._engine is not None
        job.delivered, job.handoff = True, None
        try:
            self._engine.submit_ready(job.request, pages, job.generated)
        except Exception as error:  # then the pages are still ours
            self._parts.pool.free(pages)
            self._end(job.request.request_id, FinishReason.ERROR, str(error))

    # ------------------------------------------------ in line for pages

    def _queue(self, job: Job) -> None:
        """First of all its prefill node must be met."""
        assert self.meet is not None
        peer = self._peers.get(job.prefill)
        if peer is not None and peer.link is not None:
            job.reroute_until = None
            job.give_up_at = job.give_up_at or time.monotonic() + self._parts.settings.transfer_timeout_s
            bisect.insort(self._waiting, job, key=lambda waiting: waiting.arrival)
            self.admit()
            return
        job.meeting = True
        if peer is None:
            self.meet(job.prefill)

    def admit(self) -> None:
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
        assert self._engine is not None and self.attempts is not None
        # Each running sequence may need a page at its next step: admitting more would only preempt them.
        spare = self._engine.load().running
        try:
            handoff = self.attempts.begin(job.request.request_id, job.tokens, peer, leave_free=spare)
        except OutOfPages:
            return False
        job.attempts += 1
        job.handoff, job.give_up_at = handoff, None
        return True

    # ------------------------------------------------ from the attempts and meetings

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

    def met(self, node: NodeId) -> None:
        for job in self._end_meeting(node):
            self._queue(job)

    def not_met(self, node: NodeId, reason: str, *, refused: bool) -> None:
        """A refusal counts as an attempt. A node that cannot be reached may be starting: time alone bounds that."""
        for job in self._end_meeting(node):
            job.attempts += refused
            self._try_elsewhere(job, f"could not meet {node}: {reason}")

    def _end_meeting(self, node: NodeId) -> list[Job]:
        """The jobs that have waited for it."""
        jobs = [job for job in self._jobs.values() if job.meeting and job.prefill == node]
        for job in jobs:
            job.meeting = False
        return jobs

    # ------------------------------------------------ another prefill node

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
            self._post(lambda: self._rerouted(job, node))

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

    # ------------------------------------------------ deadlines

    def check(self, now: float) -> None:
        for job in list(self._jobs.values()):
            if not job.delivered and job.handoff is None:
                self._check(job, now)
        self.admit()  # what kept the first one waiting may have ended without freeing a page

    def _check(self, job: Job, now: float) -> None:
        if job.reroute_until is not None and now > job.reroute_until:
            patience = self._parts.settings.failover_timeout_s
            error = f"prefill failed: {job.reason}; no other prefill node became ready within {patience:g} s"
            self._end(job.request.request_id, FinishReason.ERROR, error, unavailable=True)
        elif job.reroute_at is not None and now > job.reroute_at:
            self._ask_reroute(job)
        elif job.give_up_at is not None and now > job.give_up_at:
            error = "no pages became free in time: the node is overloaded"
            self._end(job.request.request_id, FinishReason.ERROR, error, unavailable=True)
