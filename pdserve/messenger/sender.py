"""The prefill side of the messenger: takes requests, follows the forward pass, writes pages as layers finish.

One thread (`pdserve-sender`) owns all state. It is the layer watcher too: while a step runs it polls the engine's layer
counter between events and submits the writes of every layer that has finished.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.hooks import Chunk, PrefillJob
from pdserve.errors import OutOfPages
from pdserve.kv.memory import KvMemory
from pdserve.kv.pool import PagePool
from pdserve.messenger.destinations import Destinations
from pdserve.messenger.handoff import prefill as h
from pdserve.messenger.mailbox import Mailbox
from pdserve.messenger.meeting import Transports
from pdserve.messenger.source import SourceHandoff
from pdserve.messenger.wire import (
    Accept,
    Cancel,
    Done,
    HandoffId,
    HandoffRequest,
    MeetCallback,
    MeetRefusal,
    MeetReply,
    MeetRequest,
    NodeCard,
    NotMet,
    Quiesced,
    Reject,
    ToDecode,
    ToDecodeChannel,
    ToPrefill,
)
from pdserve.types import Incarnation, NodeId, RequestId
from transport.api import PagedWrite, Transfer

_log = logging.getLogger(__name__)

LAYER_POLL_S = 0.0003
HISTORY = 4096  # final answers kept, for repeated messages


class PrefillEngine(Protocol):
    """What the sender asks of the engine."""

    def prefill(self, job: PrefillJob) -> None: ...

    def cancel_job(self, job_id: RequestId) -> None: ...


@dataclass(frozen=True, slots=True)
class SenderParts:
    """What a sender is put together from."""

    card: NodeCard
    memory: KvMemory
    pool: PagePool
    transports: Transports
    provider: str  # configured, or "auto"
    channel: Callable[[NodeId], ToDecodeChannel]


@dataclass(frozen=True, slots=True)
class _Step:
    chunks: tuple[Chunk, ...]
    counter_base: int


Event = Callable[[], None]


class Sender:
    """Implements `PrefillHooks`; its public methods are thread-safe and return at once."""

    def __init__(self, parts: SenderParts) -> None:
        self._parts = parts
        self._engine: PrefillEngine | None = None
        self._layer_counter: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self._peers = Destinations(parts.card, parts.transports, parts.provider)
        self._handoffs: dict[HandoffId, SourceHandoff] = {}
        self._by_job: dict[RequestId, HandoffId] = {}
        self._ended: OrderedDict[HandoffId, ToDecode] = OrderedDict()
        self._waiting: deque[HandoffId] = deque()
        self._step: _Step | None = None
        self._layers_seen = 0
        self._next_check = 0.0
        self.failures = 0
        self._mail: Mailbox[Event] = Mailbox("pdserve-sender", lambda event: event(), self._between)
        self._mail.start()
        parts.pool.subscribe(lambda: self._mail.post(self._admit))

    def attach(self, engine: PrefillEngine, layer_counter: NDArray[np.int64]) -> None:
        """Names the engine that computes, and its counter `(1,)`; before the first message."""
        self._engine, self._layer_counter = engine, layer_counter

    # ------------------------------------------------ from peers

    def meet(self, request: MeetRequest, reply: MeetCallback) -> None:
        self._mail.post(lambda: reply(self._meet(request)))

    def on_message(self, message: ToPrefill) -> None:
        if isinstance(message, HandoffRequest):
            self._mail.post(lambda: self._requested(message))
        else:
            self._mail.post(lambda: self._cancelled(message))

    def peer_lost(self, incarnation: Incarnation, reason: str) -> None:
        """The decode node is gone: its writes will never complete, so the link towards it is closed."""
        self._mail.post(lambda: self._lose(incarnation, reason))

    # ------------------------------------------------ from the engine (PrefillHooks)

    def step_started(self, chunks: tuple[Chunk, ...], counter_base: int) -> None:
        self._mail.post(lambda: self._begin_step(_Step(chunks, counter_base)))

    def step_finished(self, chunks: tuple[Chunk, ...]) -> None:
        at = time.monotonic()
        self._mail.post(lambda: self._end_step(chunks, at))

    def job_failed(self, job_id: RequestId, error: Exception) -> None:
        reason = f"the prefill engine failed: {error}"
        self._mail.post(lambda: self._let_go(job_id, reason))

    def job_cancelled(self, job_id: RequestId) -> None:
        self._mail.post(lambda: self._let_go(job_id, None))

    # ------------------------------------------------ for the node

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of handoffs that wait for source pages (those at the engine are its own to count)."""
        return sum(len(self._handoffs[i].tokens) for i in list(self._waiting) if i in self._handoffs)

    @property
    def active(self) -> int:
        return len(self._handoffs)

    def close(self) -> None:
        """Gives up what is under way and closes every link; after the engine was closed."""
        self._mail.post(self._lose_all)
        self._mail.close()
        self._peers.close()

    # ------------------------------------------------ peers

    def _meet(self, request: MeetRequest) -> MeetReply | MeetRefusal:
        if request.card.incarnation in self._peers:  # it revoked us, and meets again
            self._lose(request.card.incarnation, "the decode node met again")
        return self._peers.meet(request)

    def _lose_all(self) -> None:
        for incarnation in self._peers.all():
            self._lose(incarnation, "the prefill node is closing")

    def _lose(self, incarnation: Incarnation, reason: str) -> None:
        peer = self._peers.forget(incarnation)
        if peer is None:
            return
        _log.warning("lost %s: %s", peer.request.card.node_id, reason)
        for source in [s for s in self._handoffs.values() if s.request.source == incarnation]:
            self._feed(source, h.StopAsked(reason, answer=False))
        peer.link.close()  # every transfer of it is done on return; their callbacks are in the mailbox

    # ------------------------------------------------ messages

    def _requested(self, request: HandoffRequest) -> None:
        if self._stranger(request):
            return
        if request.id in self._ended:
            self._send(request.source, self._ended[request.id])
        elif request.id in self._handoffs:
            self._send(request.source, Accept(request.id, self._parts.card.incarnation, 0))
        elif reason := self._impossible(request):
            self._finish(request.id, request.source, self._rejection(request, reason, retryable=False))
        else:
            self._handoffs[request.id] = source = SourceHandoff(request, time.monotonic(), self._parts.card.page_size)
            self._by_job[source.job_id] = request.id
            self._waiting.append(request.id)
            self._send(request.source, Accept(request.id, self._parts.card.incarnation, len(self._handoffs) - 1))
            self._admit()

    def _impossible(self, request: HandoffRequest) -> str | None:
        card, pool = self._parts.card, self._parts.pool
        tokens = len(request.prompt) - 1
        if tokens + 1 > card.max_model_len:
            return f"prompt of {tokens + 1} tokens exceeds the context of {card.max_model_len}"
        needed = self._parts.memory.geometry.pages_for(tokens)
        if needed > pool.total:
            return f"prompt needs {needed} pages, this node has {pool.total}"
        if needed != request.present_pages + len(request.pages):
            return f"{needed} pages hold the prompt, the request names {request.present_pages} + {len(request.pages)}"
        return None

    def _rejection(self, request: HandoffRequest, reason: str, *, retryable: bool) -> Reject:
        return Reject(request.id, self._parts.card.incarnation, reason, retryable)

    def _cancelled(self, cancel: Cancel) -> None:
        if self._stranger(cancel):
            return
        if cancel.id in self._handoffs:
            self._feed(self._handoffs[cancel.id], h.StopAsked("cancelled by the decode node"))
            return
        answer = self._ended.get(cancel.id)
        if isinstance(answer, Done):
            answer = Quiesced(cancel.id, answer.source, answer.posted, "had completed before the cancel came")
        # Unknown: the cancel has overtaken its request. The tombstone answers that request when it comes.
        answer = answer or Quiesced(cancel.id, self._parts.card.incarnation, 0, "cancelled before it was requested")
        self._finish(cancel.id, cancel.source, answer)

    def _stranger(self, message: ToPrefill) -> bool:
        mine = self._parts.card.incarnation
        if message.target == mine and message.source in self._peers:
            return False
        reason = "this decode node has not met me" if message.target == mine else "my predecessor was meant"
        self._parts.channel(message.sender).send(NotMet(message.id, mine, message.target, reason))
        return True

    def _send(self, to: Incarnation, message: ToDecode) -> None:
        peer = self._peers.get(to)
        if peer is not None:
            self._parts.channel(peer.request.card.node_id).send(message)

    def _finish(self, handoff: HandoffId, to: Incarnation, answer: ToDecode) -> None:
        self._ended[handoff] = answer
        while len(self._ended) > HISTORY:
            self._ended.popitem(last=False)
        self._send(to, answer)

    # ------------------------------------------------ the engine's work

    def _admit(self) -> None:
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

    def _begin_step(self, step: _Step) -> None:
        self._step, self._layers_seen = step, 0
        now = time.monotonic()
        for chunk in step.chunks:
            if source := self._of_job(chunk.job_id):
                source.begin_chunk(chunk, now)

    def _end_step(self, chunks: tuple[Chunk, ...], at: float) -> None:
        self._advance(self._parts.memory.geometry.layers)
        self._step = None
        for chunk in chunks:
            source = self._of_job(chunk.job_id)
            if chunk.last and source is not None:
                source.computed_at = at
                self._feed(source, h.PrefillComputed())

    def _advance(self, layers: int) -> None:
        """Posts layers `seen .. layers` of the running step; updates may coalesce."""
        if self._step is None or layers <= self._layers_seen:
            return
        new = range(self._layers_seen, layers)
        self._layers_seen = layers
        for chunk in self._step.chunks:
            source = self._of_job(chunk.job_id)
            if source is not None:
                source.computed(new)
                self._feed(source, h.LayersComputed(len(new) if source.has_writes else 0))

    def _let_go(self, job_id: RequestId, failure: str | None) -> None:
        source = self._of_job(job_id)
        if self._step is not None and failure is not None and any(c.job_id == job_id for c in self._step.chunks):
            self._step = None  # nothing may be concluded from the counter any more
        if source is None:
            return
        if failure is not None:
            self._feed(source, h.StopAsked(failure))
        self._feed(source, h.EngineLetGo())

    def _of_job(self, job_id: RequestId) -> SourceHandoff | None:
        handoff = self._by_job.get(job_id)
        return None if handoff is None else self._handoffs.get(handoff)

    # ------------------------------------------------ machine in, work out

    def _feed(self, source: SourceHandoff, event: h.PrefillEvent) -> None:
        for instruction in source.machine.handle(event):
            self._execute(source, instruction)

    def _execute(self, source: SourceHandoff, instruction: h.PrefillInstruction) -> None:
        assert self._engine is not None
        mine = self._parts.card.incarnation
        match instruction:
            case h.SubmitJob():
                self._engine.prefill(PrefillJob(source.job_id, source.tokens, source.pages))
            case h.PostLayers():
                self._post(source)
            case h.StopJob():
                self._engine.cancel_job(source.job_id)
            case h.StopTransfers():
                source.stop_transfers()
            case h.FreeSourcePages():
                self._parts.pool.free(source.pages)
            case h.SendDone(posted):
                source.drained_at = time.monotonic()
                self._end(source, Done(source.request.id, mine, posted, source.timings()))
            case h.SendQuiesced(posted, reason):
                self.failures += 1
                self._end(source, Quiesced(source.request.id, mine, posted, reason))
        if source.machine.ended and source.request.id in self._handoffs:
            self._forget(source)  # ended with nobody to tell

    def _end(self, source: SourceHandoff, answer: ToDecode) -> None:
        self._forget(source)
        self._finish(source.request.id, source.request.source, answer)

    def _forget(self, source: SourceHandoff) -> None:
        self._handoffs.pop(source.request.id, None)
        self._by_job.pop(source.job_id, None)

    def _post(self, source: SourceHandoff) -> None:
        """One paged write per layer that has just been computed, for the pages of the current chunk."""
        peer = self._peers.get(source.request.source)
        assert peer is not None  # losing it has stopped the handoff
        grant, here = peer.request.regions[0], self._parts.memory.geometry
        for layer, computed_at in source.take_computed():
            write = PagedWrite(
                source=peer.source,
                target=grant.descriptor,
                block_bytes=here.block_bytes,
                source_offset=layer * here.layer_stride_bytes,
                source_stride=here.block_bytes,
                source_index=source.chunk_source,
                target_offset=layer * grant.layer_stride_bytes,
                target_stride=grant.block_bytes,
                target_index=source.chunk_target,
                imm=source.request.imm,
            )
            on_done = partial(self._transfer_done, source.request.id)
            source.submitted(layer, computed_at, peer.link.write_paged(write, on_done), here.block_bytes)

    def _transfer_done(self, handoff: HandoffId, transfer: Transfer) -> None:
        self._mail.post(lambda: self._transfer_ended(handoff, transfer))

    def _transfer_ended(self, handoff: HandoffId, transfer: Transfer) -> None:
        source = self._handoffs.get(handoff)
        if source is not None:
            error = None
            if transfer.error is not None or transfer.completed < transfer.total:
                error = f"writes failed: {transfer.error or 'stopped'}"
            self._feed(source, h.TransferEnded(transfer.posted, error))

    # ------------------------------------------------ between events

    def _between(self) -> float:
        step = self._step
        if step is not None:
            layers = int(self._layer_counter[0]) - step.counter_base
            # Beyond its layers, the step is over (or has failed), and the event that says which is in the mailbox.
            if layers <= self._parts.memory.geometry.layers:
                self._advance(layers)
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + 0.02
            self._check(now)
        return LAYER_POLL_S if step is not None else 0.05

    def _check(self, now: float) -> None:
        for incarnation in self._peers.ended():
            self._lose(incarnation, "its process has ended")
        for source in list(self._handoffs.values()):
            if now > source.deadline:
                self._feed(source, h.StopAsked(f"not finished {source.request.timeout_s:g} s after it was requested"))
