"""Which prefill node, and which decode node: pure functions over snapshots.

A snapshot is what a node last said of itself. An unready, draining or incompatible node is never picked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.types import Incarnation, NodeId, Role


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """Load of one engine replica, as its node last reported it."""

    node_id: NodeId
    incarnation: Incarnation
    role: Role
    ready: bool
    draining: bool = False
    compatibility: str = ""  # nodes work together only if this is equal: model, dtype, page size, layout, protocol
    queued_prefill_tokens: int = 0
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    total_pages: int = 0
    page_size: int = 1
    prompt_tokens_sent: int = 0  # routed there since the snapshot was taken
    requests_sent: int = 0  # routed there since the snapshot was taken
    verified: frozenset[Incarnation] | None = None  # prefill nodes it has had a transfer from; None: it does not say
    note: str = ""  # why it is not ready, for people

    @property
    def usable(self) -> bool:
        return self.ready and not self.draining

    def takes_from(self, prefill: NodeSnapshot) -> bool:
        """Whether handoffs from `prefill` work: same kind of node, and a transfer has succeeded."""
        proven = self.verified is None or prefill.incarnation in self.verified
        return proven and self.compatibility == prefill.compatibility


@dataclass(frozen=True, slots=True)
class Pair:
    """Where a request goes. A colocated node is both."""

    prefill: NodeId
    decode: NodeId


def least_loaded_pair(
    snapshots: Iterable[NodeSnapshot], prompt_tokens: int, exclude: frozenset[NodeId] = frozenset()
) -> Pair | None:
    """The prefill node with the fewest queued tokens and the decode node with the least work that suits it.

    Returns None where no usable pair exists. Ties go to the smaller node id, so the choice is a function of its input.
    """
    usable = [s for s in snapshots if s.usable and s.node_id not in exclude]
    colocated = [s for s in usable if s.role is Role.COLOCATED]
    if colocated:
        best = min(colocated, key=lambda s: (_prefill_load(s) + _decode_load(s, prompt_tokens), s.node_id))
        return Pair(best.node_id, best.node_id)
    decode = [s for s in usable if s.role is Role.DECODE]
    for source in sorted((s for s in usable if s.role is Role.PREFILL), key=lambda s: (_prefill_load(s), s.node_id)):
        targets = [s for s in decode if s.takes_from(source)]
        if targets:
            target = min(targets, key=lambda s: (_decode_load(s, prompt_tokens), s.node_id))
            return Pair(source.node_id, target.node_id)
    return None


def least_loaded_prefill(
    snapshots: Iterable[NodeSnapshot], decode: NodeId, exclude: frozenset[NodeId] = frozenset()
) -> NodeId | None:
    """Another prefill node for a request that stays at its decode node."""
    known = list(snapshots)
    home = next((s for s in known if s.node_id == decode), None)
    candidates = [
        s
        for s in known
        if s.usable and s.role is Role.PREFILL and s.node_id not in exclude and (home is None or home.takes_from(s))
    ]
    return min(candidates, key=lambda s: (_prefill_load(s), s.node_id)).node_id if candidates else None


def _prefill_load(node: NodeSnapshot) -> int:
    return node.queued_prefill_tokens + node.prompt_tokens_sent


def _decode_load(node: NodeSnapshot, prompt_tokens: int) -> float:
    """Requests there, plus a heavy penalty as the pages run short of this prompt."""
    requests = node.running + node.waiting + node.requests_sent
    needed = -(-prompt_tokens // node.page_size) + -(-node.prompt_tokens_sent // node.page_size)
    shortage = max(0, needed - node.free_pages) / max(1, node.total_pages)
    return requests + 1_000 * shortage
