"""The scheduler's own logic, without Ray: it is an ordinary class."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from actors.global_scheduler import GlobalScheduler
from pdserve.errors import NoNodeAvailable
from pdserve.messenger.wire import PROTOCOL_VERSION, NodeCard
from pdserve.types import Incarnation, NodeId, Role
from policies.layout import KvLayout
from policies.routing import NodeSnapshot
from policies.sharding import LayerGroup, ParallelLayout


def card(name: str, role: Role, fingerprint: str = "f") -> NodeCard:
    return NodeCard(
        node_id=NodeId(name),
        incarnation=Incarnation(hash(name) % 2**32),
        role=role,
        host="h",
        pid=1,
        providers=("tcp",),
        protocol=PROTOCOL_VERSION,
        model="m",
        fingerprint=fingerprint,
        dtype="fp32",
        page_size=16,
        kv_layout=KvLayout.HND,
        head_dim=16,
        groups=(LayerGroup(2, 2),),
        parallel=ParallelLayout(),
        max_model_len=128,
    )


def snapshot(of: NodeCard, *, ready: bool = True) -> NodeSnapshot:
    return NodeSnapshot(
        of.node_id,
        of.incarnation,
        of.role,
        ready,
        compatibility=of.compatibility,
        free_pages=8,
        total_pages=8,
        page_size=16,
    )


def test_decode_nodes_hear_of_the_prefill_nodes_that_fit() -> None:
    async def scenario() -> None:
        scheduler = GlobalScheduler()
        fits, other, home = card("p0", Role.PREFILL), card("p1", Role.PREFILL, "g"), card("d0", Role.DECODE)
        await scheduler.report(fits, snapshot(fits))
        await scheduler.report(other, snapshot(other))
        assert await scheduler.report(home, snapshot(home, ready=False)) == [fits]
        assert await scheduler.health() == (False, "2 of 2 prefill nodes ready, 0 of 1 decode nodes ready")
        with pytest.raises(NoNodeAvailable, match="0 of 1 decode nodes ready"):
            await scheduler.pick(10)
        await scheduler.report(home, snapshot(home))
        assert (await scheduler.health())[0]
        placement = await scheduler.pick(10)
        assert (placement.prefill, placement.decode) == (fits, home)

    asyncio.run(scenario())


def test_what_was_sent_counts_until_the_next_report() -> None:
    async def scenario() -> None:
        scheduler = GlobalScheduler()
        cards = [card("p0", Role.PREFILL), card("d0", Role.DECODE), card("d1", Role.DECODE)]
        for each in cards:
            await scheduler.report(each, snapshot(each))
        assert [(await scheduler.pick(10)).decode.node_id for _ in range(4)] == ["d0", "d1", "d0", "d1"]
        await scheduler.report(cards[1], replace(snapshot(cards[1]), running=5))
        assert (await scheduler.pick(10)).decode.node_id == "d1"

    asyncio.run(scenario())


def test_a_lost_node_is_not_used_until_it_reports_again() -> None:
    async def scenario() -> None:
        scheduler = GlobalScheduler()
        prefill, decode = card("p0", Role.PREFILL), card("d0", Role.DECODE)
        for each in (prefill, decode):
            await scheduler.report(each, snapshot(each))
        await scheduler.lost(decode.node_id)
        with pytest.raises(NoNodeAvailable):
            await scheduler.pick(10)
        await scheduler.report(decode, snapshot(decode))
        with pytest.raises(NoNodeAvailable, match="without d0, lost a moment ago"):
            await scheduler.pick(10, frozenset({decode.incarnation}))
        restarted = replace(decode, incarnation=Incarnation(99))
        await scheduler.report(restarted, snapshot(restarted))
        assert (await scheduler.pick(10, frozenset({decode.incarnation}))).decode == restarted
        assert (await scheduler.pick(10)).decode.node_id == "d0"
        assert await scheduler.another_prefill(decode.node_id, frozenset({prefill.node_id})) is None
        assert await scheduler.another_prefill(decode.node_id, frozenset()) == prefill

    asyncio.run(scenario())
