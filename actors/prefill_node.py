"""A prefill node: computes prompts and writes their pages to decode nodes. It never samples."""

from __future__ import annotations

import asyncio

from actors.channel import RayChannel
from actors.node_core import NodeCore, NodeSpec, Reporter
from pdserve.engine.engine import Engine
from pdserve.messenger.sender import Sender, SenderParts
from pdserve.messenger.wire import MeetRefusal, MeetReply, MeetRequest, NodeCard, ToPrefill
from pdserve.types import NodeId, Role
from policies.routing import NodeSnapshot


class PrefillNode:
    """Ray actor (asyncio). Its parts are threads of their own: engine, sender, transport worker, reporter."""

    def __init__(self, spec: NodeSpec) -> None:
        self._core = core = NodeCore(spec)
        self._sender = Sender(
            SenderParts(
                card=core.card,
                memory=core.memory,
                pool=core.pool,
                transports=core.transports,
                wish=core.wish,
                channel=self._channel,
            )
        )
        self._engine = Engine(
            core.model, core.memory, core.pool, spec.settings.engine, Role.PREFILL, prefill_hooks=self._sender
        )
        self._sender.attach(self._engine, self._engine.layer_counter)
        self._engine.start()
        self._reporter = Reporter(core, self._snapshot)

    def _channel(self, node: NodeId) -> RayChannel:
        # A decode node that Ray cannot reach is given up by its pidfd or by deadlines: nothing to do here.
        return RayChannel(node, lambda node, reason: None)

    def _snapshot(self) -> NodeSnapshot:
        return self._core.snapshot(self._engine, ready=True, queued_tokens=self._sender.queued_tokens)

    async def card(self) -> NodeCard:
        return self._core.card

    async def meet(self, request: MeetRequest) -> MeetReply | MeetRefusal:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[MeetReply | MeetRefusal] = loop.create_future()
        self._sender.meet(request, lambda reply: loop.call_soon_threadsafe(answer.set_result, reply))  # type: ignore[arg-type]
        return await answer

    async def control(self, message: ToPrefill) -> None:
        self._sender.on_message(message)

    async def metrics(self) -> dict[str, float]:
        values = self._core.metrics(self._engine)
        values["handoffs_active"] = self._sender.active
        values["kv_transfer_failures_total"] = self._sender.failures
        values["kv_transfer_messages_unreadable_total"] = self._sender.unreadable
        return values

    async def close(self) -> None:
        """Ends everything in order; the actor is of no use afterwards."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._reporter.close()
        self._engine.close()
        self._sender.close()
        self._core.close()
