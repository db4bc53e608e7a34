"""Handoffs between nodes of several ranks: each has its heads, each byte is written once, counts are the plan's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pdserve.messenger.destinations import unfit_regions
from pdserve.messenger.wire import MeetRequest
from policies.layout import KvLayout
from policies.sharding import LayerGroup, ParallelLayout, expected_count
from tests.pdserve.engine.toy import eventually
from tests.pdserve.messenger.pair import SETTINGS, Network, loopback
from tests.pdserve.messenger.sharded import ShardedToy
from transport.open import open_transport

# KV heads (None: a latent), ranks at prefill, ranks at decode
CASES = [(4, 2, 2), (4, 2, 1), (4, 1, 2), (4, 4, 2), (2, 4, 2), (2, 2, 4), (2, 4, 4), (4, 4, 1), (None, 2, 2),
         (None, 4, 1), (None, 1, 4), (None, 2, 4)]  # fmt: skip
LENGTHS = (2, 8, 9, 17, 33, 64)


def over(wire: str, layout: str) -> Network:
    made = loopback(3) if wire == "loopback" else Network(open_transport, wire)
    made.settings = SETTINGS.model_copy(update={"kv_layout": layout})
    return made


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_unequal_nodes(case: tuple[int | None, int, int], layout: str) -> None:
    check_handoffs(over("loopback", layout), *case)


@pytest.mark.parametrize("wire", ["tcp", "ucx"])
@pytest.mark.parametrize("case", [(4, 4, 2), (2, 4, 2), (None, 2, 4)], ids=str)
def test_over_libfabric(case: tuple[int | None, int, int], wire: str) -> None:
    check_handoffs(over(wire, "nhd"), *case)


def check_handoffs(network: Network, kv_heads: int | None, prefill: int, decode: int) -> None:
    with network:
        network.add_prefill(model=ShardedToy(prefill, kv_heads))
        side = network.add_decode(model=ShardedToy(decode, kv_heads))
        requests = [side.request(f"r{tokens}", tokens) for tokens in LENGTHS]
        side.check(*requests)
        network.settle()
        sides = [ParallelLayout(tp, side.memory.geometry.layout) for tp in (prefill, decode)]
        group = LayerGroup(side.model.config.layers, kv_heads)
        for request in requests:
            pages = -(-(len(request.prompt) - 1) // side.settings.page_size)
            count = expected_count([(group, pages)], sides[0], sides[1], side.settings.page_size)
            eventually(lambda: side.receiver.trace(request.request_id).writes_posted is not None, 20)  # type: ignore[union-attr] # noqa: B023
            trace = side.receiver.trace(request.request_id)
            assert trace is not None and trace.timings is not None
            assert trace.writes_expected == trace.writes_counted == trace.writes_posted == count
            moved = sum(layer.bytes for layer in trace.timings.layers)
            assert moved == trace.bytes_expected == pages * sum(m.geometry.page_bytes for m in side.memories)
        assert side.transport.immediates.late == side.transport.immediates.overflow == 0


def test_ranks_that_cannot_share_the_heads_are_refused_by_name() -> None:
    with loopback() as network:
        network.add_prefill(model=ShardedToy(1, 6))
        side = network.add_decode(model=ShardedToy(1, 6))
        side.receiver._peers._parts = replace(side.receiver._parts, card=replace(side.card, parallel=ParallelLayout(4)))
        error = side.error_of(side.request("r", 9))
        assert "6 KV heads cannot be shared by 4 ranks at d0: one number must be a multiple of the other" in error


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda request: replace(request, regions=request.regions[:1]), "d0 has 2 ranks and exposes 1 regions"),
        (
            lambda request: replace(
                request, regions=(request.regions[0], replace(request.regions[1], block_bytes=64))
            ),
            "rank 1 of d0 has blocks of 64 bytes",
        ),
        (
            lambda request: replace(request, card=replace(request.card, rails=(frozenset({0}),))),
            "d0 has 2 ranks and names the rails of 1",
        ),
    ],
)  # fmt: skip
def test_regions_that_are_not_what_the_card_says_are_refused(
    change: Callable[[MeetRequest], MeetRequest], said: str
) -> None:
    with loopback() as network:
        source = network.add_prefill(model=ShardedToy(4, 4))
        side = network.add_decode(model=ShardedToy(2, 4))
        meetings: list[MeetRequest] = []
        network.channels[source.node].tamper_meeting = lambda request, reply: meetings.append(request)
        side.request("r", 9)
        eventually(lambda: bool(meetings))
        assert unfit_regions(meetings[0], source.memory.geometry) is None
        assert said in (unfit_regions(change(meetings[0]), source.memory.geometry) or "")
        assert meetings[0].card.kv_layout is KvLayout.HND
