"""Where several ranks hold the same: who is read, over many requests, and that every rank and NIC carries its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from pdserve.messenger.sources import Sources
from pdserve.types import NodeId, Role
from policies.plan import RankWrites
from policies.sources import SourcePolicy
from tests.pdserve.messenger.pair import SETTINGS, DecodeSide, Network, PrefillSide, loopback
from tests.pdserve.messenger.sharded import ShardedToy
from transport.open import open_transport

REQUESTS = 160
NICS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[NodeId, int]]:
    """Paged writes by (decode node, source rank), as they are handed to the transport."""
    counted: Counter[tuple[NodeId, int]] = Counter()
    write = Sources._write

    def counting(self: Sources, source: Any, peer: Any, entry: RankWrites, computed: Any) -> None:
        counted[peer.request.card.node_id, entry.source] += 1
        write(self, source, peer, entry, computed)

    monkeypatch.setattr(Sources, "_write", counting)
    return counted


def add_prefill(network: Network, ranks: int, policy: SourcePolicy, rails: Sequence[int] = ()) -> PrefillSide:
    """Of a latent cache, which every rank has; `rails`: of each rank's only NIC."""
    side = PrefillSide(
        NodeId("p0"), Role.PREFILL, ShardedToy(ranks, None), network.settings, network.provider, network.open_tapped,
        random=Random(1), source_policy=policy,
    )  # fmt: skip
    side.card = replace(side.card, rails=tuple(frozenset({rail}) for rail in rails))
    return network.join_prefill(side)


def add_decode(network: Network, name: str, rail: int | None = None) -> DecodeSide:
    side = DecodeSide(
        NodeId(name), Role.DECODE, ShardedToy(1, None), network.settings, network.provider, network.open_tapped,
        network.handoff,
    )  # fmt: skip
    side.card = replace(side.card, rails=() if rail is None else (frozenset({rail}),))
    return network.join_decode(side)


def ask(side: DecodeSide, count: int) -> None:
    side.check(*[side.request(f"{side.node}-{number}", 4, max_tokens=1) for number in range(count)])


def chi_square(counts: Sequence[int]) -> float:
    """Against equal shares."""
    share = sum(counts) / len(counts)
    return sum((count - share) ** 2 / share for count in counts)


def test_every_source_rank_and_nic_carries_its_share(served: Counter[tuple[NodeId, int]]) -> None:
    """Eight source ranks over three NICs, one destination rank."""
    network = Network(lambda provider: open_transport(provider, nics=NICS), "tcp", SETTINGS)
    with network:
        source = add_prefill(network, 8, SourcePolicy.RANDOM)
        side = add_decode(network, "d0")
        ask(side, REQUESTS)
        network.settle()
        by_nic: dict[str, int] = source.transport.nic_stats()  # type: ignore[attr-defined]
    by_rank = [served[side.node, rank] for rank in range(8)]
    layers = side.model.config.layers
    assert sum(by_rank) == sum(by_nic.values()) == REQUESTS * layers
    # Fixed by the seed. A request is as many writes as layers, all from one rank.
    assert chi_square([count // layers for count in by_rank]) < 24.3, f"7 degrees of freedom, 1 in 1000: {by_rank}"
    assert len(by_nic) == len(NICS)
    assert chi_square(list(by_nic.values())) < 13.8, f"2 degrees of freedom, 1 in 1000: {by_nic}"


def test_by_rail_the_source_on_the_destinations_rail_is_read(served: Counter[tuple[NodeId, int]]) -> None:
    with loopback(3) as network:
        add_prefill(network, 4, SourcePolicy.RAIL, rails=(0, 1, 2, 3))
        sides = [add_decode(network, f"d{rail}", rail) for rail in range(4)]
        for side in sides:
            ask(side, 12)
        network.settle()
    assert set(served) == {(NodeId(f"d{rail}"), rail) for rail in range(4)}


def test_by_rail_those_that_are_equally_near_share_the_load(served: Counter[tuple[NodeId, int]]) -> None:
    """Two source ranks on each of the rails: the NIC of a rail, and each rank of it, carry their shares."""
    with loopback(None, (0.0, 0.0)) as network:
        add_prefill(network, 4, SourcePolicy.RAIL, rails=(0, 0, 1, 1))
        sides = [add_decode(network, f"d{rail}", rail) for rail in range(2)]
        for side in sides:
            ask(side, REQUESTS // 2)
        network.settle()
    layers = sides[0].model.config.layers
    shares = [served[NodeId(f"d{rail}"), rank] // layers for rail in range(2) for rank in (2 * rail, 2 * rail + 1)]
    assert sum(shares) == REQUESTS
    assert chi_square(shares[:2]) < 10.8 and chi_square(shares[2:]) < 10.8, f"1 degree of freedom, 1 in 1000: {shares}"


def test_by_rail_a_side_that_names_none_has_the_rails_of_its_link(served: Counter[tuple[NodeId, int]]) -> None:
    """Of the ranks here the one on the only rail of the peer's link; where neither side says more, all are equal."""
    with loopback(3) as network:
        add_prefill(network, 4, SourcePolicy.RAIL, rails=(3, 2, 1, 0))
        ask(add_decode(network, "d0"), 12)
        network.settle()
    assert {rank for _, rank in served} == {3}
    served.clear()
    with loopback(None, (0.0, 0.0)) as network:
        add_prefill(network, 4, SourcePolicy.RAIL)
        ask(add_decode(network, "d0"), REQUESTS)
        network.settle()
    assert chi_square([served[NodeId("d0"), rank] // 2 for rank in range(4)]) < 16.3, "3 degrees of freedom, 1 in 1000"
