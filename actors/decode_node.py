"""A decode node: takes requests, has their prompts prefilled elsewhere, and streams their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from actors.decode_replica import DecodeReplica
from actors.global_scheduler import Placement, ReplicaReport
from actors.names import replica_in
from actors.node_core import NodeCore, NodeSpec
from actors.reporter import Reporter
from actors.streams import LEASE_S, OutputStreams
from pdserve.errors import NoNodeAvailable
from pdserve.messenger.target import HandoffTrace
from pdserve.messenger.wire import NodeCard, ToDecode
from pdserve.types import GenerationRequest, NodeId, RequestId, SequenceOutput


class DecodeNode:
    """Ray actor (asyncio). Its parts are threads of their own: engines, receivers, transport worker, reporter.

    Each of its engine replicas is a destination of its own; they share transports and streams.
    """

    def __init__(self, spec: NodeSpec) -> None:
        self._core = core = NodeCore(spec)
        self._loop = asyncio.get_running_loop()
        self._streams = OutputStreams(self._loop)
        self._closing = False
        self._replicas = {own.card.node_id: DecodeReplica(core, own, self._streams) for own in core.replicas}
        self._leases = self._loop.create_task(self._streams.keep_leases(LEASE_S, self._cancel))
        self._reporter = Reporter(core, self._report, self._on_peers)

    # ------------------------------------------------ requests

    async def submit(self, stream: str, request: GenerationRequest, placement: Placement) -> None:
        """Takes a request for an HTTP replica's stream. Raises RequestError, ContextLengthError, NoNodeAvailable."""
        if self._closing:
            raise NoNodeAvailable(f"{self._core.spec.node_id} is closing")
        replica = replica_in(self._replicas, placement.decode.node_id)
        replica.engine.check_request(request)
        self._streams.own(request.request_id, stream)
        replica.start(request, placement.prefill)

    async def cancel(self, request_id: RequestId) -> None:
        self._cancel(request_id)

    def _cancel(self, request_id: RequestId) -> None:
        for replica in self._replicas.values():  # whichever has it
            replica.receiver.cancel(request_id)

    async def outputs(self, stream: str) -> AsyncIterator[tuple[SequenceOutput, ...]]:
        async for step in self._streams.stream(stream):
            yield step

    async def renew(self, stream: str) -> None:
        """The HTTP replica is still there; without it its requests are cancelled after a while."""
        self._streams.renew(stream)

    async def control(self, address: NodeId, message: ToDecode) -> None:
        replica_in(self._replicas, address).receiver.on_message(message)

    async def trace(self, request_id: RequestId) -> HandoffTrace | None:
        traces = (replica.receiver.trace(request_id) for replica in self._replicas.values())
        return next(filter(None, traces), None)

    # ------------------------------------------------ readiness

    def _report(self) -> tuple[ReplicaReport, ...]:
        """Called on the reporter's thread."""
        return tuple(replica.report() for replica in self._replicas.values())

    def _on_peers(self, cards: list[NodeCard]) -> None:
        """Called on the reporter's thread with the prefill replicas that report."""
        for replica in self._replicas.values():
            self._loop.call_soon_threadsafe(replica.see_peers, cards)

    # ------------------------------------------------ for operators

    async def card(self) -> NodeCard:
        return self._core.card

    async def cards(self) -> tuple[NodeCard, ...]:
        """Of all its replicas."""
        return tuple(own.card for own in self._core.replicas)

    async def rank_pids(self) -> dict[int, int]:
        """The processes of its ranks beside the leader."""
        return self._core.rank_pids

    async def metrics(self) -> dict[str, float]:
        values = self._core.metrics([replica.engine for replica in self._replicas.values()])
        values |= dict.fromkeys(("handoffs_quarantined", "kv_transfer_messages_unreadable_total"), 0.0)
        for receiver in (replica.receiver for replica in self._replicas.values()):
            values["num_requests_waiting"] += receiver.waiting
            values["handoffs_quarantined"] += receiver.quarantined_handoffs
            values["kv_transfer_messages_unreadable_total"] += receiver.unreadable
            for kind, count in receiver.failures.items():
                key = f"kv_transfer_failures_{kind}_total"
                values[key] = values.get(key, 0) + count
        return values

    async def close(self) -> None:
        """Ends everything in order; the actor is of no use afterwards."""
        self._closing = True
        self._leases.cancel()
        for replica in self._replicas.values():
            replica.stop_verifying()
        await asyncio.to_thread(self._close)
        self._streams.close()

    def _close(self) -> None:
        self._reporter.close()
        for replica in self._replicas.values():
            replica.close()
        self._core.close()
