"""`pick_pair`: which replicas it may take, and that load, affinity, rails and chance decide as they should."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pdserve.types import Incarnation, NodeId, Role
from policies.routing import Ask, NodeSnapshot, Pair, ReplicaKey, pick_pair, pick_prefill

NAMES = [NodeId(f"n{i}") for i in range(6)]


def node(name: str, role: Role, **values: object) -> NodeSnapshot:
    base = NodeSnapshot(NodeId(name), Incarnation(1), role, ready=True, free_pages=100, total_pages=100, page_size=16)
    return replace(base, **values)  # type: ignore[arg-type]


snapshots = st.lists(
    st.builds(
        NodeSnapshot,
        node_id=st.sampled_from(NAMES),
        incarnation=st.sampled_from([Incarnation(1), Incarnation(2)]),
        role=st.sampled_from([Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, Role.COLOCATED]),
        ready=st.booleans(),
        draining=st.booleans(),
        compatibility=st.sampled_from(["a", "b"]),
        queued_prefill_tokens=st.integers(0, 5_000),
        running=st.integers(0, 32),
        free_pages=st.integers(0, 64),
        total_pages=st.just(64),
        page_size=st.just(16),
        verified=st.none() | st.frozensets(st.sampled_from([Incarnation(1), Incarnation(2)])),
        replica=st.integers(0, 3),
        rails=st.frozensets(st.integers(0, 3)),
    ),
    max_size=10,
    unique_by=lambda s: s.key,
)
asks = st.builds(
    Ask,
    prompt_tokens=st.integers(1, 2_000),
    cached=st.dictionaries(st.tuples(st.sampled_from(NAMES), st.integers(0, 3)), st.integers(0, 2_000)),
    exclude=st.frozensets(st.sampled_from(NAMES), max_size=2),
)


def usable(nodes: list[NodeSnapshot], ask: Ask) -> dict[ReplicaKey, NodeSnapshot]:
    return {s.key: s for s in nodes if s.ready and not s.draining and s.node_id not in ask.exclude}


def possible(there: dict[ReplicaKey, NodeSnapshot]) -> bool:
    return any(s.role is Role.COLOCATED for s in there.values()) or any(
        p.role is Role.PREFILL and d.role is Role.DECODE and d.takes_from(p)
        for p in there.values()
        for d in there.values()
    )


@given(snapshots, asks, st.integers(0, 99))
def test_only_ready_compatible_proven_replicas_are_paired_and_a_pair_is_found_if_there_is_one(
    nodes: list[NodeSnapshot], ask: Ask, seed: int
) -> None:
    pair, there = pick_pair(nodes, ask, Random(seed)), usable(nodes, ask)
    assert (pair is not None) == possible(there)
    if pair is None:
        return
    source, target = there[pair.prefill, pair.prefill_replica], there[pair.decode, pair.decode_replica]
    if source.role is Role.COLOCATED:
        assert source is target
    else:
        assert (source.role, target.role) == (Role.PREFILL, Role.DECODE)
        assert source.compatibility == target.compatibility
        assert target.verified is None or source.incarnation in target.verified


@given(snapshots, asks, st.integers(0, 99))
def test_the_choice_is_a_function_of_snapshots_and_seed(nodes: list[NodeSnapshot], ask: Ask, seed: int) -> None:
    again = pick_pair(list(reversed(nodes)), ask, Random(seed))
    assert pick_pair(nodes, ask, Random(seed)) == again


@given(snapshots, asks, st.integers(0, 99))
def test_a_replica_without_room_is_taken_only_if_all_lack_it(nodes: list[NodeSnapshot], ask: Ask, seed: int) -> None:
    pair, there = pick_pair(nodes, ask, Random(seed)), usable(nodes, ask)
    if pair is None:
        return
    source, target = there[pair.prefill, pair.prefill_replica], there[pair.decode, pair.decode_replica]
    rivals = [s for s in there.values() if s.role is target.role and (s.role is Role.COLOCATED or s.takes_from(source))]

    def room(s: NodeSnapshot) -> bool:
        return -(-ask.missing(s) // s.page_size) <= s.free_pages

    assert room(target) or not any(room(s) for s in rivals)


@given(snapshots, asks, st.integers(0, 99), st.sampled_from(NAMES), st.integers(0, 3))
def test_failover_takes_a_usable_prefill_replica_that_suits_the_home(
    nodes: list[NodeSnapshot], ask: Ask, seed: int, name: NodeId, replica: int
) -> None:
    home = next((s for s in nodes if s.key == (name, replica)), None)
    suiting = {
        key for key, s in usable(nodes, ask).items() if s.role is Role.PREFILL and (home is None or home.takes_from(s))
    }
    chosen = pick_prefill(nodes, (name, replica), ask, Random(seed))
    assert chosen in suiting if suiting else chosen is None


def test_a_node_of_eight_replicas_is_eight_destinations() -> None:
    nodes = [node("p", Role.PREFILL), *(node("d", Role.DECODE, replica=k, running=9 - k) for k in range(8))]
    nodes[5] = replace(nodes[5], running=0)
    assert pick_pair(nodes, Ask(64), Random(0)) == Pair(NodeId("p"), NodeId("d"), 0, 4)


def test_a_long_queue_is_avoided_and_close_ones_share() -> None:
    nodes = [node(f"p{k}", Role.PREFILL, queued_prefill_tokens=10 * k) for k in range(4)]
    nodes += [node("p9", Role.PREFILL, queued_prefill_tokens=9_000), node("d", Role.DECODE)]
    taken = Counter(pair.prefill for seed in range(400) if (pair := pick_pair(nodes, Ask(64), Random(seed))))
    assert "p9" not in taken
    assert set(taken) == {"p0", "p1", "p2"}, "the worst of the close ones loses every draw of two"
    assert taken[NodeId("p0")] > taken[NodeId("p1")] > taken[NodeId("p2")] > 20


def test_a_cached_prefix_draws_the_request_to_both_sides() -> None:
    nodes = [node(f"p{k}", Role.PREFILL, queued_prefill_tokens=300) for k in range(3)]
    nodes += [node(f"d{k}", Role.DECODE, running=3, free_pages=1_000) for k in range(3)]
    ask = Ask(2_000, cached={(NodeId("p2"), 0): 1_900, (NodeId("d1"), 0): 1_900})
    picks = {pick_pair(nodes, ask, Random(seed)) for seed in range(50)}
    assert picks == {Pair(NodeId("p2"), NodeId("d1"))}
    busy = [replace(s, running=20) if s.node_id == "d1" else s for s in nodes]
    assert all(pair and pair.decode != "d1" for seed in range(50) if (pair := pick_pair(busy, ask, Random(seed))))


def test_among_equals_the_common_rail_is_preferred() -> None:
    nodes = [node("p", Role.PREFILL, rails=frozenset({2}))]
    nodes += [node("d", Role.DECODE, replica=k, rails=frozenset({k})) for k in range(4)]
    taken = Counter(pair.decode_replica for seed in range(400) if (pair := pick_pair(nodes, Ask(8), Random(seed))))
    assert taken.most_common(1)[0][0] == 2 and taken[2] > 150, "whenever it is drawn"


def test_between_two_reports_requests_spread_over_equal_nodes() -> None:
    """One snapshot for 300 requests, none of which it shows: the least loaded would have got them all."""
    nodes = [node(f"p{k}", Role.PREFILL) for k in range(3)] + [node(f"d{k}", Role.DECODE) for k in range(5)]
    random = Random(1)
    pairs = [pick_pair(nodes, Ask(64), random) for _ in range(300)]
    decodes = Counter(pair.decode for pair in pairs if pair)
    assert len(decodes) == 5 and max(decodes.values()) < 2 * min(decodes.values())
