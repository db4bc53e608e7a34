"""Several engine replicas in one process: one transport, one table of immediates, pages and links of their own."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest

from pdserve.messenger.slots import SLOTS
from pdserve.messenger.wire import HandoffRequest, MeetRequest
from pdserve.types import NodeId
from policies.sharding import LayerGroup, ParallelLayout, expected_count
from tests.pdserve.engine.toy import eventually
from tests.pdserve.messenger.pair import SETTINGS, DecodeSide, Network, loopback
from tests.pdserve.messenger.replicas import add_decode_replicas, add_prefill_replicas
from tests.pdserve.messenger.sharded import ShardedToy
from transport.api import split_imm
from transport.open import open_transport

LENGTHS = (2, 9, 17, 33, 64)


@pytest.fixture(params=["loopback", "tcp"])
def network(request: pytest.FixtureRequest) -> Network:
    return loopback(3) if request.param == "loopback" else Network(open_transport, "tcp", SETTINGS)


def exact(side: DecodeSide, prefill_tp: int, kv_heads: int | None, lengths: tuple[int, ...]) -> None:
    """All that was counted, posted and expected is what the plan says, and it took the planned bytes."""
    layouts = ParallelLayout(prefill_tp, side.card.kv_layout), side.card.parallel
    group = LayerGroup(side.model.config.layers, kv_heads)
    for tokens in lengths:
        request_id = next(name for name in side.tokens if name.endswith(f"-{tokens}"))
        pages = -(-(tokens - 1) // side.settings.page_size)
        count = expected_count([(group, pages)], *layouts, side.settings.page_size)
        eventually(lambda: side.receiver.trace(request_id).writes_posted is not None, 20)  # type: ignore[union-attr] # noqa: B023
        trace = side.receiver.trace(request_id)
        assert trace is not None and trace.timings is not None
        assert trace.writes_expected == trace.writes_counted == trace.writes_posted == count
        assert sum(layer.writes for layer in trace.timings.layers) == count
        assert sum(layer.bytes for layer in trace.timings.layers) == trace.bytes_expected


# KV heads (None: a latent), ranks at prefill, ranks of each of the decode node's two replicas
@pytest.mark.parametrize("case", [(None, 2, 1), (4, 2, 1), (4, 2, 2), (None, 1, 2)], ids=str)
def test_two_replicas_decode_in_one_process(network: Network, case: tuple[int | None, int, int]) -> None:
    """Both at once, from the same prefill node: no slot, page or count of one is the other's."""
    kv_heads, there, here = case
    with network:
        network.add_prefill(model=ShardedToy(there, kv_heads))
        sides = add_decode_replicas(network, "d0", [ShardedToy(here, kv_heads) for _ in range(2)])
        asked = {side.node: [] for side in sides}  # type: ignore[var-annotated]
        for tokens in LENGTHS:
            for side in sides:
                asked[side.node].append(side.request(f"{side.node}-{tokens}", tokens))
        for side in sides:
            side.check(*asked[side.node])
        network.settle()
        for side in sides:
            exact(side, there, kv_heads, LENGTHS)
        assert sides[0].transport is sides[1].transport
        assert sides[0].transport.immediates.late == sides[0].transport.immediates.overflow == 0
        meetings = network.channels[NodeId("p0")].of(MeetRequest)
        assert sorted(len(meeting.regions) for meeting in meetings) == [here, here]
        by_replica = [
            {split_imm(request.imm)[0] // SLOTS for request in network.channels[NodeId("p0")].of(HandoffRequest)
             if request.sender == side.node}
            for side in sides
        ]  # fmt: skip
        assert by_replica == [{0}, {1}]


@pytest.mark.parametrize("case", [(None, 1, 2), (4, 2, 1)], ids=str)
def test_two_replicas_prefill_in_one_process(network: Network, case: tuple[int | None, int, int]) -> None:
    """Each reads its own ranks' pages, of the same numbers as the other's."""
    kv_heads, there, here = case
    with network:
        sources = add_prefill_replicas(network, "p0", [ShardedToy(there, kv_heads) for _ in range(2)])
        sides = add_decode_replicas(network, "d0", [ShardedToy(here, kv_heads) for _ in range(2)])
        asked = {
            side.node: [
                side.request(f"{side.node}-{source.node}-{tokens}", tokens, source.node)
                for tokens in LENGTHS
                for source in sources
            ]
            for side in sides
        }
        for side in sides:
            side.check(*asked[side.node])
        network.settle()
        for side in sides:
            exact(side, there, kv_heads, LENGTHS)
        served = Counter(side.receiver.trace(name).prefill for side in sides for name in side.tokens)  # type: ignore[union-attr]
        assert served == {source.node: 2 * len(LENGTHS) for source in sources}


def test_a_replica_that_is_lost_leaves_the_other_alone() -> None:
    """It closes and is revoked; the other's links, slots and pages stay."""
    with loopback(3) as network:
        network.add_prefill(model=ShardedToy(2, 4))
        first, second = add_decode_replicas(network, "d0", [ShardedToy(1, 4) for _ in range(2)])
        side_requests = [[side.request(f"{side.node}-{n}", n) for n in LENGTHS] for side in (first, second)]
        first.check(*side_requests[0])
        first.receiver.peer_lost(NodeId("p0"), "it seemed so")
        second.check(*side_requests[1], second.request("more", 40))
        network.settle()
        assert len(network.channels[NodeId("p0")].of(MeetRequest)) == 2
        first.check(first.request("again", 40))
        assert len(network.channels[NodeId("p0")].of(MeetRequest)) == 3
        network.settle()
        assert not list(chain(first.faults, second.faults))
