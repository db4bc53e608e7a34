"""The global scheduler: engine replicas' snapshots in, a pair out, by a pure policy. It never touches tokens' data."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from random import Random

from pdserve.errors import NoNodeAvailable
from pdserve.messenger.wire import NodeCard
from pdserve.types import Incarnation, NodeId, Role
from policies.routing import Ask, NodeSnapshot, ReplicaKey, pick_pair, pick_prefill

STALE_S = 5.0  # a node that has not reported for so long is not used


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. A colocated replica is both."""

    prefill: NodeCard
    decode: NodeCard


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a node says of one of its engine replicas."""

    card: NodeCard
    snapshot: NodeSnapshot


@dataclass(slots=True)
class _Known:
    card: NodeCard
    snapshot: NodeSnapshot
    reported_at: float


class GlobalScheduler:
    """Ray actor (asyncio). Restarted, it learns everything anew from the nodes' reports.

    Among replicas that are about equally good chance decides; `seed` makes its choices repeatable.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)
        self._replicas: dict[ReplicaKey, _Known] = {}

    async def report(self, reports: tuple[ReplicaReport, ...]) -> list[NodeCard]:
        """What a node says of all of its replicas; returns the prefill replicas that could work for it."""
        now = time.monotonic()
        for report in reports:
            self._replicas[report.snapshot.key] = _Known(report.card, report.snapshot, now)
        return [
            known.card
            for known in self._fresh()
            if known.card.role is Role.PREFILL
            and known.snapshot.usable
            and known.card.compatibility == reports[0].card.compatibility
        ]

    async def pick(self, prompt_tokens: int, lost: frozenset[Incarnation] = frozenset()) -> Placement:
        """`lost` are incarnations that the asker has lost sight of: with one of them their whole node is out.

        Raises NoNodeAvailable, saying what is missing.
        """
        fresh = self._fresh()
        exclude = frozenset(known.snapshot.node_id for known in fresh if known.card.incarnation in lost)
        ask = Ask(prompt_tokens, exclude=exclude)
        pair = pick_pair([known.snapshot for known in fresh], ask, self._random)
        if pair is None:
            without = f" (without {', '.join(sorted(exclude))}, lost a moment ago)" if exclude else ""
            raise NoNodeAvailable(f"no pair of nodes is ready: {self._summary()}{without}")
        prefill, decode = (pair.prefill, pair.prefill_replica), (pair.decode, pair.decode_replica)
        for key in {prefill, decode}:
            self._count(self._replicas[key], prompt_tokens)
        return Placement(self._replicas[prefill].card, self._replicas[decode].card)

    def _count(self, known: _Known, prompt_tokens: int) -> None:
        known.snapshot = replace(
            known.snapshot,
            requests_sent=known.snapshot.requests_sent + 1,
            prompt_tokens_sent=known.snapshot.prompt_tokens_sent + prompt_tokens,
        )

    async def another_prefill(self, decode: NodeId, exclude: frozenset[NodeId]) -> NodeCard | None:
        """Another prefill replica for a request that stays at its decode replica; all of them by their addresses."""
        fresh = self._fresh()
        home = next((known.snapshot.key for known in fresh if known.card.node_id == decode), (decode, 0))
        left = [known.snapshot for known in fresh if known.card.node_id not in exclude]
        key = pick_prefill(left, home, Ask(0), self._random)
        return None if key is None else self._replicas[key].card

    async def lost(self, node: NodeId) -> None:
        """Somebody could not reach it: none of its replicas is used until it reports again."""
        self._replicas = {key: known for key, known in self._replicas.items() if key[0] != node}

    async def nodes(self) -> list[NodeSnapshot]:
        """Of all replicas of all nodes."""
        return [known.snapshot for known in self._fresh()]

    async def health(self) -> tuple[bool, str]:
        """Whether a request could be served now, and the nodes as one line."""
        pair = pick_pair([known.snapshot for known in self._fresh()], Ask(1), Random(0))
        return pair is not None, self._summary()

    def _fresh(self) -> list[_Known]:
        now = time.monotonic()
        return [known for known in self._replicas.values() if now - known.reported_at < STALE_S]

    def _summary(self) -> str:
        snapshots = [known.snapshot for known in self._fresh()]
        parts = [_ready(role, there) for role in Role if (there := [s for s in snapshots if s.role is role])]
        notes = sorted({snapshot.note for snapshot in snapshots if snapshot.note})
        return "; ".join([", ".join(parts) or "no node has reported", *notes])


def _ready(role: Role, snapshots: list[NodeSnapshot]) -> str:
    """A node is ready when all of its replicas are."""
    nodes = {snapshot.node_id for snapshot in snapshots}
    waiting = {snapshot.node_id for snapshot in snapshots if not snapshot.usable}
    text = f"{len(nodes - waiting)} of {len(nodes)} {role} nodes ready"
    if len(snapshots) > len(nodes):
        text += f" ({sum(s.usable for s in snapshots)} of {len(snapshots)} replicas)"
    return text
