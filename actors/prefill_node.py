"""A prefill node: computes prompts and writes their pages to decode nodes. It never samples."""

from __future__ import annotations

import asyncio
from random import Random

from actors.channel import RayChannel
from actors.global_scheduler import ReplicaReport
from actors.names import replica_in
from actors.node_core import NodeCore, NodeSpec, ReplicaCore
from actors.reporter import Reporter
from pdserve.messenger.sender import Sender, SenderParts
from pdserve.messenger.wire import MeetRefusal, MeetReply, MeetRequest, NodeCard, ToPrefill
from pdserve.types import NodeId
from policies.sources import SourcePolicy


class PrefillReplica:
    """One engine replica of a prefill node: its engine and its sender."""

    def __init__(self, node: NodeCore, own: ReplicaCore) -> None:
        self._own = own
        self.sender = Sender(
            SenderParts(
                card=own.card,
                memory=own.memory,
                pool=own.pool,
                transports=node.transports,
                wish=node.wish,
                channel=_channel,
                replica=own.replica,
                random=Random(own.card.node_id),
                source_policy=SourcePolicy(node.spec.settings.handoff.sources),
            )
        )
        self.engine = own.engine(node.spec.settings, prefill_hooks=self.sender)
        self.sender.attach(self.engine, self.engine.layer_counter)
        self.engine.start()

    def report(self) -> ReplicaReport:
        """Called on the reporter's thread."""
        snapshot = self._own.snapshot(self.engine, ready=True, queued_tokens=self.sender.queued_tokens)
        return ReplicaReport(self._own.card, snapshot)

    def close(self) -> None:
        self.engine.close()
        self.sender.close()


class PrefillNode:
    """Ray actor (asyncio). Its parts are threads of their own: engines, senders, transport worker, reporter."""

    def __init__(self, spec: NodeSpec) -> None:
        self._core = core = NodeCore(spec)
        self._replicas = {own.card.node_id: PrefillReplica(core, own) for own in core.replicas}
        self._reporter = Reporter(core, self._report)

    def _report(self) -> tuple[ReplicaReport, ...]:
        return tuple(replica.report() for replica in self._replicas.values())

    async def card(self) -> NodeCard:
        return self._core.card

    async def cards(self) -> tuple[NodeCard, ...]:
        """Of all its replicas."""
        return tuple(own.card for own in self._core.replicas)

    async def rank_pids(self) -> dict[int, int]:
        """The processes of its ranks beside the leader."""
        return self._core.rank_pids

    async def meet(self, address: NodeId, request: MeetRequest) -> MeetReply | MeetRefusal:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[MeetReply | MeetRefusal] = loop.create_future()
        sender = replica_in(self._replicas, address).sender
        sender.meet(request, lambda reply: loop.call_soon_threadsafe(answer.set_result, reply))  # type: ignore[arg-type]
        return await answer

    async def control(self, address: NodeId, message: ToPrefill) -> None:
        replica_in(self._replicas, address).sender.on_message(message)

    async def metrics(self) -> dict[str, float]:
        values = self._core.metrics([replica.engine for replica in self._replicas.values()])
        senders = [replica.sender for replica in self._replicas.values()]
        values["handoffs_active"] = sum(sender.active for sender in senders)
        values["kv_transfer_failures_total"] = sum(sender.failures for sender in senders)
        values["kv_transfer_messages_unreadable_total"] = sum(sender.unreadable for sender in senders)
        return values

    async def close(self) -> None:
        """Ends everything in order; the actor is of no use afterwards."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._reporter.close()
        for replica in self._replicas.values():
            replica.close()
        self._core.close()


def _channel(address: NodeId) -> RayChannel:
    # A decode replica that Ray cannot reach is given up by its pidfd or by deadlines: nothing to do here.
    return RayChannel(address, lambda address, reason: None)
