from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pdserve.types import Incarnation, NodeId, Role
from policies.routing import NodeSnapshot, Pair, least_loaded_pair, least_loaded_prefill


def node(name: str, role: Role, **values: object) -> NodeSnapshot:
    base = NodeSnapshot(NodeId(name), Incarnation(1), role, ready=True, free_pages=100, total_pages=100, page_size=16)
    return replace(base, **values)  # type: ignore[arg-type]


def test_the_prefill_queue_and_the_decode_batch_decide() -> None:
    nodes = [
        node("p0", Role.PREFILL, queued_prefill_tokens=900),
        node("p1", Role.PREFILL, queued_prefill_tokens=100),
        node("d0", Role.DECODE, running=4),
        node("d1", Role.DECODE, running=1),
    ]
    assert least_loaded_pair(nodes, 64) == Pair(NodeId("p1"), NodeId("d1"))


def test_a_decode_node_short_of_pages_is_avoided() -> None:
    nodes = [
        node("p0", Role.PREFILL),
        node("d0", Role.DECODE, running=0, free_pages=2),
        node("d1", Role.DECODE, running=9),
    ]
    assert least_loaded_pair(nodes, 1_000) == Pair(NodeId("p0"), NodeId("d1"))


def test_failover_stays_with_the_decode_node_and_its_kind() -> None:
    nodes = [
        node("p0", Role.PREFILL),
        node("p1", Role.PREFILL, queued_prefill_tokens=5),
        node("p2", Role.PREFILL, compatibility="other model"),
        node("d0", Role.DECODE),
    ]
    assert least_loaded_prefill(nodes, NodeId("d0"), frozenset({NodeId("p0")})) == "p1"
    assert least_loaded_prefill(nodes, NodeId("d0"), frozenset({NodeId("p0"), NodeId("p1")})) is None


def test_a_decode_node_takes_only_from_prefill_nodes_that_it_has_verified() -> None:
    proven, new = (
        node("p0", Role.PREFILL, queued_prefill_tokens=50),
        node("p1", Role.PREFILL, incarnation=Incarnation(2)),
    )
    home = node("d0", Role.DECODE, verified=frozenset({Incarnation(1)}))
    assert least_loaded_pair([proven, new, home], 8) == Pair(NodeId("p0"), NodeId("d0"))
    assert least_loaded_prefill([new, home], NodeId("d0")) is None


snapshots = st.lists(
    st.builds(
        NodeSnapshot,
        node_id=st.sampled_from([NodeId(f"n{i}") for i in range(8)]),
        incarnation=st.just(Incarnation(1)),
        role=st.sampled_from(list(Role)),
        ready=st.booleans(),
        draining=st.booleans(),
        compatibility=st.sampled_from(["a", "b"]),
        queued_prefill_tokens=st.integers(0, 5_000),
        running=st.integers(0, 32),
        free_pages=st.integers(0, 64),
        total_pages=st.just(64),
        page_size=st.just(16),
    ),
    max_size=8,
    unique_by=lambda s: s.node_id,
)


excluded = st.frozensets(st.sampled_from([NodeId(f"n{i}") for i in range(8)]), max_size=3)


@given(snapshots, st.integers(1, 4_000), excluded)
def test_only_usable_compatible_nodes_are_paired(
    nodes: list[NodeSnapshot], prompt: int, exclude: frozenset[NodeId]
) -> None:
    pair = least_loaded_pair(nodes, prompt, exclude)
    by_id = {s.node_id: s for s in nodes}
    usable = {s.node_id: s for s in nodes if s.usable and s.node_id not in exclude}
    if pair is None:
        roles = [(s.role, s.compatibility) for s in usable.values()]
        assert not any(r is Role.COLOCATED for r, _ in roles)
        assert not any((Role.PREFILL, c) in roles and (Role.DECODE, c) in roles for c in ("a", "b"))
        return
    source, target = by_id[pair.prefill], by_id[pair.decode]
    assert pair.prefill in usable and pair.decode in usable
    if source.role is Role.COLOCATED:
        assert pair.prefill == pair.decode
    else:
        assert (source.role, target.role) == (Role.PREFILL, Role.DECODE)
        assert source.compatibility == target.compatibility
