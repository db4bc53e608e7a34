"""One engine replica of a decode node: its engine, its receiver, and the prefill replicas that are known to work."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from actors.channel import RayChannel
from actors.global_scheduler import ReplicaReport
from actors.names import scheduler_handle
from actors.node_core import NodeCore, ReplicaCore
from actors.streams import OutputStreams
from pdserve.messenger.peers import ReceiverParts
from pdserve.messenger.receiver import Receiver
from pdserve.messenger.wire import NodeCard
from pdserve.types import (
    FinishReason,
    GenerationRequest,
    Incarnation,
    NodeId,
    RequestId,
    SamplingParams,
    SequenceOutput,
)

_log = logging.getLogger(__name__)

RerouteReply = Callable[[NodeId | None], None]

VERIFY_RETRY_S = 1.0
ABSENT_S = 15.0  # a prefill node that has not reported for so long is given up


class DecodeReplica:
    """Made, and used where nothing else is said, on the node's event loop.

    It is ready once a real transfer from a prefill replica that is there now has succeeded.
    """

    def __init__(self, node: NodeCore, own: ReplicaCore, streams: OutputStreams) -> None:
        self._own = own
        self._loop = asyncio.get_running_loop()
        self._streams = streams
        self._cards: dict[NodeId, NodeCard] = {}
        self._verified: dict[NodeId, Incarnation] = {}
        self._verifying: set[Incarnation] = set()
        self._absent_since: dict[NodeId, float] = {}
        self._note = "waits for a prefill node"
        self._tasks: set[asyncio.Task[None]] = set()
        settings = node.spec.settings
        self.receiver = Receiver(
            ReceiverParts(
                card=own.card,
                memory=own.memory,
                pool=own.pool,
                transports=node.transports,
                settings=settings.handoff,
                wish=node.wish,
                window=settings.transport.window,
                channel=lambda address: RayChannel(address, self.receiver.peer_lost),
                card_of=self._cards.get,
                reroute=self._reroute,
                emit=streams.emit,
                replica=own.replica,
            )
        )
        self.engine = own.engine(settings, decode_hooks=self.receiver)
        self.receiver.attach(self.engine)
        self.engine.start()

    def start(self, request: GenerationRequest, prefill: NodeCard, *, only_there: bool = False) -> None:
        self._cards[prefill.node_id] = prefill
        self.receiver.start(request, prefill.node_id, only_there=only_there)

    def _reroute(self, request_id: RequestId, exclude: frozenset[NodeId], reply: RerouteReply) -> None:
        """Called on the receiver's thread."""

        def answer(future: Future[NodeCard | None]) -> None:
            card = None if future.exception() else future.result()
            if card is not None:
                self._cards[card.node_id] = card
            reply(None if card is None else card.node_id)

        try:
            ref = scheduler_handle().another_prefill.remote(self._own.card.node_id, exclude)
        except ValueError:  # the scheduler is being restarted
            reply(None)
        else:
            ref.future().add_done_callback(answer)

    # ------------------------------------------------ readiness

    def report(self) -> ReplicaReport:
        """Called on the reporter's thread."""
        verified = frozenset(self._verified.values()) & self.receiver.met
        snapshot = self._own.snapshot(self.engine, ready=bool(verified), waiting=self.receiver.waiting)
        note = "" if verified else f"{self._own.card.node_id} {self._note}"
        return ReplicaReport(self._own.card, replace(snapshot, verified=verified, note=note))

    def see_peers(self, cards: list[NodeCard]) -> None:
        """Verifies prefill replicas that are new, and gives up those that were replaced or have long been silent."""
        now, there, met = time.monotonic(), {card.node_id for card in cards}, self.receiver.met
        # A link that was revoked since proves nothing any more: the next small transfer shows whether all is well.
        self._verified = {address: who for address, who in self._verified.items() if who in met}
        for card in cards:
            self._absent_since.pop(card.node_id, None)
            if self._verified.get(card.node_id, card.incarnation) != card.incarnation:
                del self._verified[card.node_id]
                self.receiver.peer_replaced(card.node_id, card.incarnation)
            if card.node_id not in self._verified and card.incarnation not in self._verifying:
                self._verifying.add(card.incarnation)
                self._tasks.add(task := self._loop.create_task(self._verify(card)))
                task.add_done_callback(self._tasks.discard)
        for address in self._verified.keys() - there:
            if now - self._absent_since.setdefault(address, now) > ABSENT_S:
                del self._verified[address], self._absent_since[address]
                self.receiver.peer_lost(address, f"it has not reported for {ABSENT_S:.0f} s")

    async def _verify(self, card: NodeCard) -> None:
        """One small request through the whole path: meeting, handoff, count, one decode step."""
        ended: asyncio.Future[SequenceOutput] = self._loop.create_future()
        request = self._small_request()
        self._streams.own_locally(request.request_id, partial(_set_if_last, ended))
        self.start(request, card, only_there=True)
        output = await ended
        trace = self.receiver.trace(request.request_id)
        # Elsewhere, or at a second try, it says nothing about this node.
        direct = trace is not None and (trace.prefill, trace.attempt) == (card.node_id, 1) and trace.writes_counted > 0
        if output.finish is FinishReason.LENGTH and direct:
            _log.info("a transfer from %s has succeeded", card.node_id)
            self._verified[card.node_id] = card.incarnation
        else:
            self._note = f"had no transfer from {card.node_id}: {output.error or 'it came from elsewhere'}"
            _log.warning("%s", self._note)
            await asyncio.sleep(VERIFY_RETRY_S)
        self._verifying.discard(card.incarnation)

    def _small_request(self) -> GenerationRequest:
        tokens = min(self._own.card.page_size + 2, self._own.card.max_model_len - 1)
        request_id = RequestId(f"verify-{secrets.token_hex(8)}")
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        return GenerationRequest(request_id, tuple(range(1, tokens + 1)), sampling)

    # ------------------------------------------------ the end

    def stop_verifying(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def close(self) -> None:
        """Called on any thread, once the node reports no more."""
        self.engine.close()
        self.receiver.close()


def _set_if_last(ended: asyncio.Future[SequenceOutput], output: SequenceOutput) -> None:
    if output.finish is not None and not ended.done():
        ended.set_result(output)
