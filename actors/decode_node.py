"""A decode node: takes requests, has their prompts prefilled elsewhere, and streams their tokens."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from actors.channel import RayChannel
from actors.names import scheduler_handle
from actors.node_core import NodeCore, NodeSpec, Reporter
from actors.streams import OutputStreams
from pdserve.engine.engine import Engine
from pdserve.errors import NoNodeAvailable
from pdserve.messenger.peers import ReceiverParts
from pdserve.messenger.receiver import Receiver
from pdserve.messenger.target import HandoffTrace
from pdserve.messenger.wire import NodeCard, ToDecode
from pdserve.types import (
    FinishReason,
    GenerationRequest,
    Incarnation,
    NodeId,
    RequestId,
    Role,
    SamplingParams,
    SequenceOutput,
)
from policies.routing import NodeSnapshot

_log = logging.getLogger(__name__)

RerouteReply = Callable[[NodeId | None], None]

LEASE_S = 60.0  # a replica that has not been heard of for so long is gone
VERIFY_RETRY_S = 1.0
ABSENT_S = 15.0  # a prefill node that has not reported for so long is given up


def _set_if_last(ended: asyncio.Future[SequenceOutput], output: SequenceOutput) -> None:
    if output.finish is not None and not ended.done():
        ended.set_result(output)


class DecodeNode:
    """Ray actor (asyncio). Its parts are threads of their own: engine, receiver, transport worker, reporter.

    It is ready once a real transfer from a prefill node that is there now has succeeded.
    """

    def __init__(self, spec: NodeSpec) -> None:
        self._core = core = NodeCore(spec)
        self._loop = asyncio.get_running_loop()
        self._streams = OutputStreams(self._loop)
        self._cards: dict[NodeId, NodeCard] = {}
        self._verified: dict[NodeId, Incarnation] = {}
        self._verifying: set[Incarnation] = set()
        self._absent_since: dict[NodeId, float] = {}
        self._note = "waits for a prefill node"
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._receiver = Receiver(
            ReceiverParts(
                card=core.card,
                memory=core.memory,
                pool=core.pool,
                transports=core.transports,
                settings=spec.settings.handoff,
                wish=core.wish,
                window=spec.settings.transport.window,
                channel=lambda node: RayChannel(node, self._receiver.peer_lost),
                card_of=self._cards.get,
                reroute=self._reroute,
                emit=self._streams.emit,
            )
        )
        self._engine = Engine(
            core.model, core.memory, core.pool, spec.settings.engine, Role.DECODE, decode_hooks=self._receiver
        )
        self._receiver.attach(self._engine)
        self._engine.start()
        self._leases = self._loop.create_task(self._streams.keep_leases(LEASE_S, self._receiver.cancel))
        self._reporter = Reporter(core, self._snapshot, self._on_peers)

    # ------------------------------------------------ requests

    async def submit(self, replica: str, request: GenerationRequest, prefill: NodeCard) -> None:
        """Takes a request for an HTTP replica. Raises RequestError, ContextLengthError, NoNodeAvailable."""
        if self._closing:
            raise NoNodeAvailable(f"{self._core.spec.node_id} is closing")
        self._engine.check_request(request)
        self._cards[prefill.node_id] = prefill
        self._streams.own(request.request_id, replica)
        self._receiver.start(request, prefill.node_id)

    async def cancel(self, request_id: RequestId) -> None:
        self._receiver.cancel(request_id)

    async def outputs(self, replica: str) -> AsyncIterator[tuple[SequenceOutput, ...]]:
        async for step in self._streams.stream(replica):
            yield step

    async def renew(self, replica: str) -> None:
        """The replica is still there; without it its requests are cancelled after a while."""
        self._streams.renew(replica)

    async def control(self, message: ToDecode) -> None:
        self._receiver.on_message(message)

    async def trace(self, request_id: RequestId) -> HandoffTrace | None:
        return self._receiver.trace(request_id)

    def _reroute(self, request_id: RequestId, exclude: frozenset[NodeId], reply: RerouteReply) -> None:
        """Called on the receiver's thread."""

        def answer(future: Future[NodeCard | None]) -> None:
            card = None if future.exception() else future.result()
            if card is not None:
                self._cards[card.node_id] = card
            reply(None if card is None else card.node_id)

        try:
            ref = scheduler_handle().another_prefill.remote(self._core.spec.node_id, exclude)
        except ValueError:  # the scheduler is being restarted
            reply(None)
        else:
            ref.future().add_done_callback(answer)

    # ------------------------------------------------ readiness

    def _snapshot(self) -> NodeSnapshot:
        verified = frozenset(self._verified.values()) & self._receiver.met
        snapshot = self._core.snapshot(self._engine, ready=bool(verified), waiting=self._receiver.waiting)
        note = "" if verified else f"{self._core.spec.node_id} {self._note}"
        return replace(snapshot, verified=verified, note=note)

    def _on_peers(self, cards: list[NodeCard]) -> None:
        """Called on the reporter's thread with the prefill nodes that report."""
        self._loop.call_soon_threadsafe(self._see_peers, cards)

    def _see_peers(self, cards: list[NodeCard]) -> None:
        """Verifies prefill nodes that are new, and gives up those that were replaced or have long been silent."""
        now, there, met = time.monotonic(), {card.node_id for card in cards}, self._receiver.met
        # A link that was revoked since proves nothing any more: the next small transfer shows whether all is well.
        self._verified = {node: who for node, who in self._verified.items() if who in met}
        for card in cards:
            self._absent_since.pop(card.node_id, None)
            if self._verified.get(card.node_id, card.incarnation) != card.incarnation:
                del self._verified[card.node_id]
                self._receiver.peer_replaced(card.node_id, card.incarnation)
            if card.node_id not in self._verified and card.incarnation not in self._verifying:
                self._verifying.add(card.incarnation)
                self._tasks.add(task := self._loop.create_task(self._verify(card)))
                task.add_done_callback(self._tasks.discard)
        for node in self._verified.keys() - there:
            if now - self._absent_since.setdefault(node, now) > ABSENT_S:
                del self._verified[node], self._absent_since[node]
                self._receiver.peer_lost(node, f"it has not reported for {ABSENT_S:.0f} s")

    async def _verify(self, card: NodeCard) -> None:
        """One small request through the whole path: meeting, handoff, count, one decode step."""
        tokens = min(self._core.geometry.page_size + 2, self._core.card.max_model_len - 1)
        request_id = RequestId(f"verify-{secrets.token_hex(8)}")
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = GenerationRequest(request_id, tuple(range(1, tokens + 1)), sampling)
        ended: asyncio.Future[SequenceOutput] = self._loop.create_future()
        self._streams.own_locally(request_id, partial(_set_if_last, ended))
        self._cards[card.node_id] = card
        self._receiver.start(request, card.node_id, only_there=True)
        output = await ended
        trace = self._receiver.trace(request_id)
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

    # ------------------------------------------------ for operators

    async def card(self) -> NodeCard:
        return self._core.card

    async def metrics(self) -> dict[str, float]:
        values = self._core.metrics(self._engine)
        values["num_requests_waiting"] += self._receiver.waiting
        values["handoffs_quarantined"] = self._receiver.quarantined_handoffs
        values["kv_transfer_messages_unreadable_total"] = self._receiver.unreadable
        for kind, count in self._receiver.failures.items():
            values[f"kv_transfer_failures_{kind}_total"] = count
        return values

    async def close(self) -> None:
        """Ends everything in order; the actor is of no use afterwards."""
        self._closing = True
        self._leases.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.to_thread(self._close)
        self._streams.close()

    def _close(self) -> None:
        self._reporter.close()
        self._engine.close()
        self._receiver.close()
        self._core.close()
