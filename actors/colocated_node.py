"""A colocated node: prefill and decode in one engine. The baseline that everything is compared with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from actors.global_scheduler import Placement, ReplicaReport
from actors.names import replica_in
from actors.node_core import NodeCore, NodeSpec
from actors.reporter import Reporter
from actors.streams import LEASE_S, OutputStreams
from pdserve.messenger.wire import NodeCard
from pdserve.types import GenerationRequest, RequestId, SequenceOutput


class _EmitOutputs:
    """`DecodeHooks` of an engine that has no messenger."""

    def __init__(self, streams: OutputStreams) -> None:
        self.step_outputs = streams.emit

    def preempted(self, request: GenerationRequest, generated: tuple[int, ...]) -> None:
        raise AssertionError("a colocated engine recomputes by itself")


class ColocatedNode:
    """Ray actor (asyncio), with the face of a decode node."""

    def __init__(self, spec: NodeSpec) -> None:
        self._core = core = NodeCore(spec)
        loop = asyncio.get_running_loop()
        self._streams = OutputStreams(loop)
        hooks = _EmitOutputs(self._streams)
        self._engines = {own.card.node_id: own.engine(spec.settings, decode_hooks=hooks) for own in core.replicas}
        for engine in self._engines.values():
            engine.start()
        self._leases = loop.create_task(self._streams.keep_leases(LEASE_S, self._cancel))
        self._reporter = Reporter(core, self._report)

    def _report(self) -> tuple[ReplicaReport, ...]:
        return tuple(
            ReplicaReport(own.card, own.snapshot(self._engines[own.card.node_id], ready=True))
            for own in self._core.replicas
        )

    async def submit(self, stream: str, request: GenerationRequest, placement: Placement) -> None:
        """Takes a request for an HTTP replica's stream. Raises RequestError, ContextLengthError."""
        engine = replica_in(self._engines, placement.decode.node_id)
        self._streams.own(request.request_id, stream)
        try:
            engine.submit(request)
        except BaseException:
            self._streams.disown(request.request_id)
            raise

    async def cancel(self, request_id: RequestId) -> None:
        self._cancel(request_id)

    def _cancel(self, request_id: RequestId) -> None:
        for engine in self._engines.values():  # whichever has it
            engine.cancel(request_id)

    async def outputs(self, stream: str) -> AsyncIterator[tuple[SequenceOutput, ...]]:
        async for step in self._streams.stream(stream):
            yield step

    async def renew(self, stream: str) -> None:
        self._streams.renew(stream)

    async def trace(self, request_id: RequestId) -> None:
        return None

    async def card(self) -> NodeCard:
        return self._core.card

    async def cards(self) -> tuple[NodeCard, ...]:
        """Of all its replicas."""
        return tuple(own.card for own in self._core.replicas)

    async def rank_pids(self) -> dict[int, int]:
        """The processes of its ranks beside the leader."""
        return self._core.rank_pids

    async def metrics(self) -> dict[str, float]:
        return self._core.metrics(list(self._engines.values()))

    async def close(self) -> None:
        self._leases.cancel()
        await asyncio.to_thread(self._close)
        self._streams.close()

    def _close(self) -> None:
        self._reporter.close()
        for engine in self._engines.values():
            engine.close()
        self._core.close()
