"""The prefill side of the messenger: takes requests, follows the forward pass, writes pages as layers finish.

One thread (`pdserve-sender`) owns all state. It is the layer watcher too: while a step runs it polls the engine's layer
counter between events and submits the writes of every layer that has finished.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.hooks import Chunk
from pdserve.messenger.destinations import Destination, Destinations
from pdserve.messenger.line import Intake, send
from pdserve.messenger.mailbox import Mailbox
from pdserve.messenger.sources import PrefillEngine, SenderParts, Sources
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
    NotMet,
    Quiesced,
    Reject,
    ToDecode,
    ToPrefill,
)
from pdserve.types import Incarnation, NodeId, RequestId

__all__ = ["Sender", "SenderParts"]

_log = logging.getLogger(__name__)

LAYER_POLL_S = 0.0003
CHECK_S = 0.02


Event = Callable[[], None]


class Sender:
    """Implements `PrefillHooks`; its public methods are thread-safe and return at once."""

    def __init__(self, parts: SenderParts) -> None:
        self._parts = parts
        self._layer_counter: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self._intake: Intake[ToPrefill] = Intake(HandoffRequest, Cancel)
        self._peers = Destinations(parts, self._take)
        self._next_check = 0.0
        self._closed = False
        self._mail: Mailbox[Event] = Mailbox("pdserve-sender", lambda event: event(), self._between)
        self._sources = Sources(parts, self._peers, self._mail.post)
        self._sources.ends = self
        self._mail.start()
        self._unsubscribe = parts.pool.subscribe(lambda: self._mail.post(self._sources.admit))

    def attach(self, engine: PrefillEngine, layer_counter: NDArray[np.int64]) -> None:
        """Names the engine that computes, and its counter `(1,)`; before the first message."""
        self._sources.attach(engine)
        self._layer_counter = layer_counter

    # ------------------------------------------------ from peers

    def meet(self, request: MeetRequest, reply: MeetCallback) -> None:
        self._mail.post(lambda: self._answer_meeting(request, reply))

    def on_message(self, message: ToPrefill) -> None:
        """One that has come aside of the links."""
        self._mail.post(lambda: self._message(message))

    def _take(self, node: NodeId, data: bytes) -> None:
        """Called on a transport's thread."""
        self._mail.post(lambda: self._read(node, data))

    def peer_lost(self, incarnation: Incarnation, reason: str) -> None:
        """The decode node is gone: its writes will never complete, so the link towards it is closed."""
        self._mail.post(lambda: self._lose(incarnation, reason))

    # ------------------------------------------------ from the engine (PrefillHooks)

    def step_started(self, chunks: tuple[Chunk, ...], counter_base: int) -> None:
        self._mail.post(lambda: self._sources.begin_step(chunks, counter_base))

    def step_finished(self, chunks: tuple[Chunk, ...]) -> None:
        at = time.monotonic()
        self._mail.post(lambda: self._sources.end_step(chunks, at))

    def job_failed(self, job_id: RequestId, error: Exception) -> None:
        reason = f"the prefill engine failed: {error}"
        self._mail.post(lambda: self._sources.job_failed(job_id, reason))

    def job_cancelled(self, job_id: RequestId) -> None:
        self._mail.post(lambda: self._sources.let_go(job_id))

    # ------------------------------------------------ for the node

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of handoffs that wait for source pages (those at the engine are its own to count)."""
        return self._sources.queued_tokens

    @property
    def active(self) -> int:
        return len(self._sources)

    @property
    def failures(self) -> int:
        """Handoffs that ended without their pages, cancelled ones apart."""
        return self._sources.failures

    @property
    def unreadable(self) -> int:
        """Messages dropped because they were none of ours."""
        return self._intake.unreadable

    def close(self) -> None:
        """Gives up what is under way and closes every link; after the engine was closed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._unsubscribe()
        lost = threading.Event()
        self._mail.post(lambda: self._lose_all(lost))
        lost.wait()  # the ends of the links' transfers are in the mailbox now
        self._mail.close()
        self._peers.close()

    # ------------------------------------------------ peers

    def _answer_meeting(self, request: MeetRequest, reply: MeetCallback) -> None:
        try:
            answer: MeetReply | MeetRefusal | Exception = self._meet(request)
        except Exception as error:
            _log.exception("meeting %s failed", request.card.node_id)
            answer = error
        reply(answer)

    def _meet(self, request: MeetRequest) -> MeetReply | MeetRefusal:
        answer = self._peers.answered(request)
        if answer is not None:
            return answer
        for predecessor in self._peers.others_at(request.card):
            # Told, in case that this meeting is the late one: the other then meets again.
            self._lose(predecessor, "another incarnation lives there", tell=True)
        self._lose(request.card.incarnation, "the decode node revoked this one, and meets again")
        self._sources.release_held(request.card.incarnation)
        return self._peers.meet(request)

    def _lose_all(self, lost: threading.Event) -> None:
        try:
            for incarnation in self._peers.all():
                self._lose(incarnation, "the prefill node is closing", tell=True)
        finally:
            lost.set()

    def _lose(self, incarnation: Incarnation, reason: str, *, tell: bool = False) -> None:
        """Closes the link; its handoffs end. With `tell`, the decode node lives and hears that it must meet anew.

        It hears so even if no handoff is under way: not every provider shows a peer that its link is closed.
        """
        hold = tell and self._peers.may_still_read(incarnation)
        peer = self._peers.forget(incarnation, watch=hold)
        if peer is None:
            return
        _log.warning("lost %s: %s", peer.request.card.node_id, reason)
        self._sources.stop_all(incarnation, reason, hold=hold)
        self._peers.close_link(peer)  # the callbacks of its transfers are in the mailbox then
        if tell:
            mine, meeting = self._parts.card.incarnation, HandoffId(incarnation, peer.request.number)
            self._send_aside(peer.request.card.node_id, NotMet(meeting, mine, mine, reason))

    def broken(self, peer: Destination, reason: str) -> None:
        """A write failed, which ends its link: whatever follows would fail too, until the two have met again."""
        if self._peers.get(peer.request.card.incarnation) is peer:
            self._lose(peer.request.card.incarnation, reason, tell=True)

    # ------------------------------------------------ messages

    def _read(self, node: NodeId, data: bytes) -> None:
        message = self._intake.read(data, node)
        if message is not None:
            self._message(message)

    def _message(self, message: ToPrefill) -> None:
        if isinstance(message, HandoffRequest):
            self._requested(message)
        else:
            self._cancelled(message)

    def _requested(self, request: HandoffRequest) -> None:
        peer = self._sender_of(request)
        if peer is None:
            return
        answer = peer.answers.get(request.id)
        if answer is not None:
            self._send(peer, answer)
        elif request.id in self._sources:
            self._accept(peer, request, 0)
        elif peer.answers.void(request.id):
            _log.warning("%s of %s comes too late: not carried out", request.id, request.sender)
        elif reason := self._sources.impossible(request):
            reject = Reject(request.id, self._parts.card.incarnation, reason, retryable=False)
            self.finish(peer, reject)
        else:
            self._accept(peer, request, len(self._sources))
            self._sources.add(request)
            self._sources.admit()

    def _cancelled(self, cancel: Cancel) -> None:
        peer = self._sender_of(cancel)
        if peer is None:
            return
        mine = self._parts.card.incarnation
        answer = peer.answers.get(cancel.id)
        if isinstance(answer, Done):
            answer = Quiesced(cancel.id, answer.source, answer.posted, "had completed before the cancel came")
        elif answer is None and cancel.id in self._sources:
            self._sources.cancel(cancel.id)
            return
        elif answer is None and peer.answers.void(cancel.id):
            return  # what became of it is not known any more; D revokes if it still minds
        # Unknown: the cancel has overtaken its request. The tombstone answers that request when it comes.
        self.finish(peer, answer or Quiesced(cancel.id, mine, 0, "cancelled before it was requested"))

    def _sender_of(self, message: ToPrefill) -> Destination | None:
        """The decode node that this comes from; a stranger is told that it is one."""
        mine = self._parts.card.incarnation
        peer = self._peers.get(message.source) if message.target == mine else None
        if peer is None:
            reason = "this decode node has not met me" if message.target == mine else "my predecessor was meant"
            self._send_aside(message.sender, NotMet(message.id, mine, message.target, reason))
        return peer

    def _accept(self, peer: Destination, request: HandoffRequest, position: int) -> None:
        self._send(peer, Accept(request.id, self._parts.card.incarnation, position))

    def _send(self, peer: Destination, message: ToDecode) -> None:
        send(message, peer.link, lambda message: self._send_aside(peer.request.card.node_id, message))

    def _send_aside(self, to: NodeId, message: ToDecode) -> None:
        try:
            self._parts.channel(to).send(message)
        except Exception as error:  # as if it had been lost on the way, which the protocol bears
            _log.warning("%s to %s was not sent: %s", type(message).__name__, to, error)

    def finish(self, peer: Destination, answer: Reject | Quiesced | Done) -> None:
        peer.answers.put(answer.id, answer)
        self._send(peer, answer)

    # ------------------------------------------------ between events

    def _between(self) -> float:
        watch = self._sources.watch
        if watch.running:
            counter = int(self._layer_counter[0])
            if self._mail.idle:  # else an event may wait that says that this step has failed
                self._sources.advance(watch.look(counter))
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + CHECK_S
            self._check(now)
        return LAYER_POLL_S if watch.running else 0.05

    def _check(self, now: float) -> None:
        for incarnation in self._peers.ended():
            self._lose(incarnation, "its process has ended")
            self._sources.release_held(incarnation)
        for incarnation, fault in self._peers.broken():
            self._lose(incarnation, f"its link has failed: {fault}", tell=True)
        for incarnation in self._sources.check(now):
            self._lose(incarnation, "its writes do not complete", tell=True)
