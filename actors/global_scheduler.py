"""The global scheduler: nodes' snapshots in, a pair out, by a pure policy. It never touches tokens' data."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from pdserve.errors import NoNodeAvailable
from pdserve.messenger.wire import NodeCard
from pdserve.types import Incarnation, NodeId, Role
from policies.routing import NodeSnapshot, least_loaded_pair, least_loaded_prefill

STALE_S = 5.0  # a node that has not reported for so long is not used


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. A colocated node is both."""

    prefill: NodeCard
    decode: NodeCard


@dataclass(slots=True)
class _Known:
    card: NodeCard
    snapshot: NodeSnapshot
    reported_at: float


class GlobalScheduler:
    """Ray actor (asyncio). Restarted, it learns everything anew from the nodes' reports."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, _Known] = {}

    async def report(self, card: NodeCard, snapshot: NodeSnapshot) -> list[NodeCard]:
        """What a node says of itself; returns the prefill nodes that could work for it."""
        self._nodes[card.node_id] = _Known(card, snapshot, time.monotonic())
        return [
            known.card
            for known in self._fresh()
            if known.card.role is Role.PREFILL
            and known.snapshot.usable
            and known.card.compatibility == card.compatibility
        ]

    async def pick(self, prompt_tokens: int, lost: frozenset[Incarnation] = frozenset()) -> Placement:
        """`lost` are incarnations that the asker has lost sight of. Raises NoNodeAvailable, saying what is missing."""
        fresh = self._fresh()
        exclude = frozenset(known.card.node_id for known in fresh if known.card.incarnation in lost)
        pair = least_loaded_pair([known.snapshot for known in fresh], prompt_tokens, exclude)
        if pair is None:
            without = f" (without {', '.join(sorted(exclude))}, lost a moment ago)" if exclude else ""
            raise NoNodeAvailable(f"no pair of nodes is ready: {self._summary()}{without}")
        for node in {pair.prefill, pair.decode}:
            known = self._nodes[node]
            known.snapshot = replace(
                known.snapshot,
                requests_sent=known.snapshot.requests_sent + 1,
                prompt_tokens_sent=known.snapshot.prompt_tokens_sent + prompt_tokens,
            )
        return Placement(self._nodes[pair.prefill].card, self._nodes[pair.decode].card)

    async def another_prefill(self, decode: NodeId, exclude: frozenset[NodeId]) -> NodeCard | None:
        """Another prefill node for a request that stays at its decode node."""
        node = least_loaded_prefill([known.snapshot for known in self._fresh()], decode, exclude)
        return None if node is None else self._nodes[node].card

    async def lost(self, node: NodeId) -> None:
        """Somebody could not reach it: it is not used until it reports again."""
        self._nodes.pop(node, None)

    async def nodes(self) -> list[NodeSnapshot]:
        return [known.snapshot for known in self._fresh()]

    async def health(self) -> tuple[bool, str]:
        """Whether a request could be served now, and the nodes as one line."""
        pair = least_loaded_pair([known.snapshot for known in self._fresh()], 1)
        return pair is not None, self._summary()

    def _fresh(self) -> list[_Known]:
        now = time.monotonic()
        return [known for known in self._nodes.values() if now - known.reported_at < STALE_S]

    def _summary(self) -> str:
        fresh = self._fresh()
        parts = []
        for role in Role:
            there = [known.snapshot for known in fresh if known.card.role is role]
            if there:
                parts.append(f"{sum(s.usable for s in there)} of {len(there)} {role} nodes ready")
        notes = sorted({known.snapshot.note for known in fresh if known.snapshot.note})
        return "; ".join([", ".join(parts) or "no node has reported", *notes])
