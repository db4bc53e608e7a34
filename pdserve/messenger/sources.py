"""A prefill node's handoffs: pages allotted, jobs at the engine, layers posted as they finish, and every page freed.

Owned by the sender's thread. Messages and links are the sender's business: it is told through `Ends`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Protocol

from pdserve.engine.hooks import Chunk, PrefillJob
from pdserve.errors import OutOfPages
from pdserve.kv.memory import KvMemory
from pdserve.kv.pool import PagePool
from pdserve.messenger.destinations import Destination, Destinations
from pdserve.messenger.draw import Draw
from pdserve.messenger.handoff import prefill as h
from pdserve.messenger.layers import LayerWatch
from pdserve.messenger.meeting import ALONE, Replica, Transports, WireWish
from pdserve.messenger.source import SourceHandoff
from pdserve.messenger.wire import Done, HandoffId, HandoffRequest, NodeCard, Quiesced, Reject, ToDecodeChannel
from pdserve.types import Incarnation, NodeId, PageIndex, RequestId
from policies.plan import RankWrites
from policies.sources import SourcePolicy
from transport.api import Transfer
from transport.errors import TransferCancelled, TransportError

DRAIN_PATIENCE_S = 10.0  # for writes in flight of a handoff that was stopped; then the link is closed


class PrefillEngine(Protocol):
    """What the sender asks of the engine."""

    def prefill(self, job: PrefillJob) -> None: ...

    def cancel_job(self, job_id: RequestId) -> None: ...


@dataclass(frozen=True, slots=True)
class SenderParts:
    """What a sender is put together from. `memory`: of its first rank; the others' are alike."""

    card: NodeCard
    memory: KvMemory
    pool: PagePool
    transports: Transports
    wish: WireWish
    channel: Callable[[NodeId], ToDecodeChannel]
    replica: Replica = ALONE
    random: Random = field(default_factory=Random)  # draws which copies of the cache are read …
    source_policy: SourcePolicy = SourcePolicy.RANDOM  # … by this rule


class Ends(Protocol):
    """Who is told what became of handoffs and links."""

    def finish(self, peer: Destination, answer: Reject | Quiesced | Done) -> None: ...

    def broken(self, peer: Destination, reason: str) -> None: ...


class Sources:
    def __init__(self, parts: SenderParts, peers: Destinations, post: Callable[[Callable[[], None]], None]) -> None:
        self._parts = parts
        self._peers = peers
        self._post_event = post
        self._engine: PrefillEngine | None = None
        self._handoffs: dict[HandoffId, SourceHandoff] = {}
        self._by_job: dict[RequestId, HandoffId] = {}
        self._held: dict[Incarnation, list[PageIndex]] = {}
        self._waiting: deque[HandoffId] = deque()
        self.draw = Draw(parts.card, parts.memory.geometry, parts.source_policy, parts.random)
        self.watch = LayerWatch(parts.memory.geometry.layers)
        self.ends: Ends | None = None
        self.failures = 0  # ended without their pages, cancelled ones apart

    def attach(self, engine: PrefillEngine) -> None:
        self._engine = engine

    def __len__(self) -> int:
        return len(self._handoffs)

    def __contains__(self, handoff: HandoffId) -> bool:
        return handoff in self._handoffs

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait for source pages."""
        waiting = [self._handoffs.get(handoff) for handoff in list(self._waiting)]
        return sum(len(source.tokens) for source in waiting if source is not None)

    def impossible(self, request: HandoffRequest) -> str | None:
        """Why no patience will do."""
        card, pool = self._parts.card, self._parts.pool
        tokens = len(request.prompt) - 1
        if tokens + 1 > card.max_model_len:
            return f"prompt of {tokens + 1} tokens exceeds the context of {card.max_model_len}"
        needed = self._parts.memory.geometry.pages_for(tokens)
        if needed > pool.total:
            return f"prompt needs {needed} pages, {card.node_id} has {pool.total} (raise engine.kv_cache_tokens there)"
        if needed != request.present_pages + len(request.pages):
            return f"{needed} pages hold the prompt, the request names {request.present_pages} + {len(request.pages)}"
        return None

    def add(self, request: HandoffRequest) -> None:
        """It starts when pages allow, which `admit` sees to."""
        peer = self._peers.get(request.source)
        assert peer is not None  # who has sent it has been met
        plan = self.draw.plan(peer, len(request.pages))
        source = SourceHandoff(request, time.monotonic(), self._parts.card.page_size, plan.entries)
        self._handoffs[request.id] = source
        self._by_job[source.job_id] = request.id
        self._waiting.append(request.id)

    def cancel(self, handoff: HandoffId) -> None:
        source = self._handoffs[handoff]
        source.cancelled = True
        self._stop(source, "cancelled by the decode node")

    def stop_all(self, incarnation: Incarnation, reason: str, *, hold: bool) -> None:
        """Those of a decode node that is lost; they end, unanswered, when its link is closed.

        With `hold`, pages that writes may have left in flight are quarantined until `release_held`.
        """
        hit = [source for source in self._handoffs.values() if source.request.source == incarnation]
        for source in hit:
            source.hold = hold and source.machine.in_flight > 0
            self._stop(source, reason, answer=False)

    def release_held(self, incarnation: Incarnation) -> None:
        """That decode node has ended, or has closed its side: it reads nothing of ours any more."""
        for source in self._handoffs.values():
            if source.request.source == incarnation:
                source.hold = False
        self._parts.pool.release(self._held.pop(incarnation, ()))

    # ------------------------------------------------ the engine's work

    def admit(self) -> None:
        """Allots source pages in order of arrival."""
        while self._waiting:
            source = self._handoffs.get(self._waiting[0])
            if source is None or source.machine.state is not h.PrefillState.QUEUED:
                self._waiting.popleft()
                continue
            try:
                source.pages = self._parts.pool.allocate(self._parts.memory.geometry.pages_for(len(source.tokens)))
            except OutOfPages:
                return
            self._waiting.popleft()
            self._feed(source, h.SourcePagesAllotted())

    def begin_step(self, chunks: tuple[Chunk, ...], counter_base: int) -> None:
        self.watch.begin(chunks, counter_base)
        now = time.monotonic()
        for chunk in chunks:
            if source := self._of_job(chunk.job_id):
                source.begin_chunk(chunk, now)

    def end_step(self, chunks: tuple[Chunk, ...], at: float) -> None:
        self.advance(self.watch.end())
        for chunk in chunks:
            source = self._of_job(chunk.job_id)
            if chunk.last and source is not None:
                source.computed_at = at
                self._feed(source, h.PrefillComputed())

    def advance(self, layers: range) -> None:
        """Posts layers of the running step; updates may coalesce."""
        if not layers:
            return
        for chunk in self.watch.chunks:
            source = self._of_job(chunk.job_id)
            if source is not None:
                source.computed(layers)
                self._feed(source, h.LayersComputed(len(layers) * len(source.entries) if source.has_writes else 0))

    def job_failed(self, job_id: RequestId, reason: str) -> None:
        self.watch.failed(job_id)
        source = self._of_job(job_id)
        if source is not None:
            self._feed(source, h.EngineLetGo())
            self._stop(source, reason)

    def let_go(self, job_id: RequestId) -> None:
        source = self._of_job(job_id)
        if source is not None:
            self._feed(source, h.EngineLetGo())

    def _of_job(self, job_id: RequestId) -> SourceHandoff | None:
        handoff = self._by_job.get(job_id)
        return None if handoff is None else self._handoffs.get(handoff)

    # ------------------------------------------------ machine in, work out

    def _stop(self, source: SourceHandoff, reason: str, *, answer: bool = True) -> None:
        self._feed(source, h.StopAsked(reason, answer))

    def _feed(self, source: SourceHandoff, event: h.PrefillEvent) -> None:
        for instruction in source.machine.handle(event):
            self._execute(source, instruction)
        if source.machine.state is h.PrefillState.CANCELLING:
            source.drain_by = source.drain_by or time.monotonic() + DRAIN_PATIENCE_S
        if source.machine.ended and self._handoffs.pop(source.request.id, None) is not None:
            self._by_job.pop(source.job_id, None)
            self.failures += source.machine.state is h.PrefillState.QUIESCED and not source.cancelled

    def _execute(self, source: SourceHandoff, instruction: h.PrefillInstruction) -> None:
        assert self._engine is not None and self.ends is not None
        mine, peer = self._parts.card.incarnation, self._peers.get(source.request.source)
        match instruction:
            case h.SubmitJob():
                self._submit(source)
            case h.PostLayers():
                self._post(source)
            case h.StopJob():
                self._engine.cancel_job(source.job_id)
            case h.StopTransfers():
                source.log.cancel()
            case h.FreeSourcePages() if source.hold:
                self._parts.pool.quarantine(source.pages)
                self._held.setdefault(source.request.source, []).extend(source.pages)
            case h.FreeSourcePages():
                self._parts.pool.free(source.pages)
            case h.SendDone(posted) if peer is not None:
                source.drained_at = time.monotonic()
                self.ends.finish(peer, Done(source.request.id, mine, posted, source.timings()))
            case h.SendQuiesced(posted, reason) if peer is not None:
                self.ends.finish(peer, Quiesced(source.request.id, mine, posted, reason))

    def _submit(self, source: SourceHandoff) -> None:
        assert self._engine is not None
        try:
            self._engine.prefill(PrefillJob(source.job_id, source.tokens, source.pages))
        except Exception as error:  # it did not take the job: the pages are free to go
            self._feed(source, h.EngineLetGo())
            self._stop(source, f"the prefill engine refused: {error}")

    def _post(self, source: SourceHandoff) -> None:
        """A paged write per layer that has just been computed and pair of ranks, for the pages of the current chunk."""
        peer = self._peers.get(source.request.source)
        assert peer is not None  # losing it has stopped the handoff
        for layer, computed_at in source.take_computed():
            for entry in source.entries:
                if source.machine.state is h.PrefillState.CANCELLING:  # an earlier write failed
                    self._feed(source, h.TransferEnded(0, None))
                else:
                    self._write(source, peer, entry, (layer, computed_at))

    def _write(self, source: SourceHandoff, peer: Destination, entry: RankWrites, computed: tuple[int, float]) -> None:
        assert self.ends is not None
        layer, computed_at = computed
        region, grant = peer.sources[entry.source], peer.request.regions[entry.destination]
        strides = self._parts.memory.geometry.layer_stride_bytes, grant.layer_stride_bytes
        write = source.layer_write(entry, entry.layer_writes(layer, *strides), region, grant)
        posted_at = time.monotonic()
        try:
            transfer = peer.link.write_paged(write, partial(self._transfer_done, source.request.id, peer))
        except (TransportError, ValueError) as error:
            if isinstance(error, TransportError):
                self._post_event(partial(self.ends.broken, peer, str(error)))
            self._feed(source, h.TransferEnded(0, f"writes cannot be posted: {error}"))
        else:
            size_bytes = write.block_bytes * transfer.total
            source.log.submitted(layer, (computed_at, posted_at), transfer, size_bytes)

    def _transfer_done(self, handoff: HandoffId, peer: Destination, transfer: Transfer) -> None:
        self._post_event(lambda: self._transfer_ended(handoff, peer, transfer))

    def _transfer_ended(self, handoff: HandoffId, peer: Destination, transfer: Transfer) -> None:
        assert self.ends is not None
        error = transfer.error
        if error is not None and not isinstance(error, TransferCancelled):
            self.ends.broken(peer, f"writes failed: {error}")
        source = self._handoffs.get(handoff)
        if source is not None:
            self._feed(source, h.TransferEnded(transfer.posted, None if error is None else f"writes failed: {error}"))

    # ------------------------------------------------ deadlines

    def check(self, now: float) -> list[Incarnation]:
        """Stops what is overdue; returns the decode nodes towards which writes do not complete any more."""
        stuck = []
        for source in list(self._handoffs.values()):
            if now > source.deadline:
                self._stop(source, f"not finished {source.request.timeout_s:g} s after it was requested")
            if source.machine.in_flight and source.drain_by is not None and now > source.drain_by:
                stuck.append(source.request.source)
        return stuck
