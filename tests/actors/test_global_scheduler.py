"""The scheduler's own logic, without Ray: it is an ordinary class."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from actors.global_scheduler import GlobalScheduler, ReplicaReport
from actors.names import node_of, replica_address
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
        node_of(of.node_id),
        of.incarnation,
        of.role,
        ready,
        compatibility=of.compatibility,
        free_pages=8,
        total_pages=8,
        page_size=16,
        replica=int(of.node_id.partition(".")[2] or 0),
    )


def reports(*cards: NodeCard, ready: bool = True) -> tuple[ReplicaReport, ...]:
    return tuple(ReplicaReport(of, snapshot(of, ready=ready)) for of in cards)


def replicas(name: str, role: Role, count: int = 2) -> tuple[NodeCard, ...]:
    return tuple(card(replica_address(NodeId(name), number, count), role) for number in range(count))


def test_decode_nodes_hear_of_the_prefill_nodes_that_fit() -> None:
    async def scenario() -> None:
        scheduler = GlobalScheduler()
        fits, other, home = card("p0", Role.PREFILL), card("p1", Role.PREFILL, "g"), card("d0", Role.DECODE)
        await scheduler.report(reports(fits))
        await scheduler.report(reports(other))
        assert await scheduler.report(reports(home, ready=False)) == [fits]
        assert await scheduler.health() == (False, "2 of 2 prefill nodes ready, 0 of 1 decode nodes ready")
        with pytest.raises(NoNodeAvailable, match="0 of 1 decode nodes ready"):
            await scheduler.pick(10)
        await scheduler.report(reports(home))
        assert (await scheduler.health())[0]
        placement = await scheduler.pick(10)
        assert (placement.prefill, placement.decode) == (fits, home)

    asyncio.run(scenario())


def test_what_was_sent_counts_until_the_next_report() -> None:
    async def scenario() -> None:
        scheduler = GlobalScheduler()
        cards = [card("p0", Role.PREFILL), card("d0", Role.DECODE), card("d1", Role.DECODE)]
        for each in cards:
            await scheduler.report(reports(each))
        for _ in range(5):  # of two, the one that got less
            pair = [(await scheduler.pick(10)).decode.node_id for _ in range(2)]
            assert sorted(pair) == ["d0", "d1"]
        await scheduler.report((ReplicaReport(cards[1], replace(snapshot(cards[1]), running=50)),))
        assert (await scheduler.pick(10)).decode.node_id == "d1"

    asyncio.run(scenario())


def test_replicas_of_a_node_are_destinations_of_their_own() -> None:
    async def scenario() -> None:
        scheduler = GlobalScheduler()
        sources, targets = replicas("p0", Role.PREFILL), replicas("d0", Role.DECODE, 4)
        assert await scheduler.report(reports(*targets)) == []
        assert await scheduler.report(reports(*sources)) == list(sources)
        placements = [await scheduler.pick(100) for _ in range(40)]
        for side, addresses in (
            ("prefill", sources),
            ("decode", targets),
        ):  # as evenly as chance among close ones lets it
            got = Counter(getattr(placement, side).node_id for placement in placements)
            assert got.keys() == {of.node_id for of in addresses} and max(got.values()) - min(got.values()) <= 4
        assert {snapshot.key for snapshot in await scheduler.nodes()} >= {("d0", 3), ("p0", 1)}
        left = reports(*targets[:3]) + reports(targets[3], ready=False)
        await scheduler.report(left)
        assert await scheduler.health() == (
            True,
            "1 of 1 prefill nodes ready (2 of 2 replicas), 0 of 1 decode nodes ready (3 of 4 replicas)",
        )
        assert "d0.3" not in {(await scheduler.pick(100)).decode.node_id for _ in range(40)}

    asyncio.run(scenario())


def test_choices_repeat_themselves_with_the_seed() -> None:
    async def choices(seed: int) -> list[NodeId]:
        scheduler = GlobalScheduler(seed)
        await scheduler.report(reports(card("p0", Role.PREFILL)))
        for number in range(8):
            await scheduler.report(reports(card(f"d{number}", Role.DECODE)))
        return [(await scheduler.pick(10)).decode.node_id for _ in range(20)]

    first, second, other = (asyncio.run(choices(seed)) for seed in (1, 1, 2))
    assert first == second != other


def test_a_lost_node_is_not_used_until_it_reports_again() -> None:
    async def scenario() -> None:
        scheduler = GlobalScheduler()
        prefill, decode = card("p0", Role.PREFILL), card("d0", Role.DECODE)
        for each in (prefill, decode):
            await scheduler.report(reports(each))
        await scheduler.lost(decode.node_id)
        with pytest.raises(NoNodeAvailable):
            await scheduler.pick(10)
        await scheduler.report(reports(decode))
        with pytest.raises(NoNodeAvailable, match="without d0, lost a moment ago"):
            await scheduler.pick(10, frozenset({decode.incarnation}))
        restarted = replace(decode, incarnation=Incarnation(99))
        await scheduler.report(reports(restarted))
        assert (await scheduler.pick(10, frozenset({decode.incarnation}))).decode == restarted
        assert (await scheduler.pick(10)).decode.node_id == "d0"
        assert await scheduler.another_prefill(decode.node_id, frozenset({prefill.node_id})) is None
        assert await scheduler.another_prefill(decode.node_id, frozenset()) == prefill

    asyncio.run(scenario())


def test_a_node_is_lost_with_all_its_replicas() -> None:
    async def scenario() -> None:
        scheduler = GlobalScheduler()
        sources, gone, left = replicas("p0", Role.PREFILL), replicas("d0", Role.DECODE), replicas("d1", Role.DECODE)
        for cards in (sources, gone, left):
            await scheduler.report(reports(*cards))
        seen = frozenset({gone[1].incarnation})
        assert {node_of((await scheduler.pick(10, seen)).decode.node_id) for _ in range(20)} == {"d1"}
        await scheduler.lost(NodeId("d0"))
        assert {node_of((await scheduler.pick(10)).decode.node_id) for _ in range(20)} == {"d1"}
        # A prefill replica that failed at a handoff says nothing of its neighbour.
        assert await scheduler.another_prefill(left[1].node_id, frozenset({sources[0].node_id})) == sources[1]
        assert await scheduler.another_prefill(left[1].node_id, frozenset(of.node_id for of in sources)) is None

    asyncio.run(scenario())
