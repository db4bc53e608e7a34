"""A colocated node: prefill and decode in one engine. The baseline that everything is compared with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from actors.decode_node import LEASE_S
from actors.node_core import NodeCore, NodeSpec, Reporter
from actors.streams import OutputStreams
from pdserve.engine.engine import Engine
from pdserve.messenger.wire import NodeCard
from pdserve.types import GenerationRequest, RequestId, Role, SequenceOutput
from policies.routing import NodeSnapshot


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
        self._streams = OutputStreams(asyncio.get_running_loop())
        hooks = _EmitOutputs(self._streams)
        self._engine = Engine(
            core.model, core.memory, core.pool, spec.settings.engine, Role.COLOCATED, decode_hooks=hooks
        )
        self._engine.start()
        loop = asyncio.get_running_loop()
        self._leases = loop.create_task(self._streams.keep_leases(LEASE_S, self._engine.cancel))
        self._reporter = Reporter(core, self._snapshot)

    def _snapshot(self) -> NodeSnapshot:
        return self._core.snapshot(self._engine, ready=True)

    async def submit(self, replica: str, request: GenerationRequest, prefill: NodeCard) -> None:
        """Takes a request for an HTTP replica. Raises RequestError, ContextLengthError."""
        self._streams.own(request.request_id, replica)
        try:
            self._engine.submit(request)
        except BaseException:
            self._streams.disown(request.request_id)
            raise

    async def cancel(self, request_id: RequestId) -> None:
        self._engine.cancel(request_id)

    async def outputs(self, replica: str) -> AsyncIterator[tuple[SequenceOutput, ...]]:
        async for step in self._streams.stream(replica):
            yield step

    async def renew(self, replica: str) -> None:
        self._streams.renew(replica)

    async def trace(self, request_id: RequestId) -> None:
        return None

    async def card(self) -> NodeCard:
        return self._core.card

    async def metrics(self) -> dict[str, float]:
        return self._core.metrics(self._engine)

    async def close(self) -> None:
        self._leases.cancel()
        await asyncio.to_thread(self._close)
        self._streams.close()

    def _close(self) -> None:
        self._reporter.close()
        self._engine.close()
        self._core.close()
