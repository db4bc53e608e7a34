"""Which prefill replica, and which decode replica: pure functions over snapshots.

A snapshot is what a node last said of one of its engine replicas: a node of eight is eight destinations. An unready,
draining or incompatible one is never picked.

`pick_pair` is what a scheduler uses: load, prefix affinity and rails decide, and among the close ones two are drawn and
the better taken. Snapshots are old by the time they are used; who always took the least loaded would send everything of
one report's lifetime to the same node (M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001).
`least_loaded_pair` is the same without affinity, rails and chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from pdserve.types import Incarnation, NodeId, Role

ReplicaKey = tuple[NodeId, int]


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
    replica: int = 0  # of the node's engine replicas
    rails: frozenset[int] = frozenset()  # of the replica's NICs

    @property
    def key(self) -> ReplicaKey:
        return self.node_id, self.replica

    @property
    def usable(self) -> bool:
        return self.ready and not self.draining

    def takes_from(self, prefill: NodeSnapshot) -> bool:
        """Whether handoffs from `prefill` work: same kind of node, and a transfer has succeeded."""
        proven = self.verified is None or prefill.incarnation in self.verified
        return proven and self.compatibility == prefill.compatibility


@dataclass(frozen=True, slots=True)
class Pair:
    """Where a request goes. A colocated replica is both."""

    prefill: NodeId
    decode: NodeId
    prefill_replica: int = 0
    decode_replica: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to place. `cached`: how many of the prompt's leading tokens a replica has in its prefix cache."""

    prompt_tokens: int
    cached: Mapping[ReplicaKey, int] = field(default_factory=dict)
    exclude: frozenset[NodeId] = frozenset()

    def missing(self, node: NodeSnapshot) -> int:
        """Prompt tokens that are not there yet."""
        return max(0, self.prompt_tokens - self.cached.get(node.key, 0))


@dataclass(frozen=True, slots=True)
class Weights:
    """What counts for how much. Estimates: the order of the terms matters, the exact values hardly."""

    close_tokens: int = 256
    """Prefill queues that differ by less, or by a tenth of the shortest, count as equally long."""
    close_requests: float = 1.0
    """Decode loads that differ by less, or by a tenth of the least, count as equal."""
    affinity_requests: float = 2.0
    """A whole prompt in the decode replica's cache outweighs so many requests there."""
    rail_requests: float = 0.5
    """So does a common rail, by which blocks pass one switch less."""


def pick_pair(
    snapshots: Iterable[NodeSnapshot], ask: Ask, random: Random, weights: Weights | None = None
) -> Pair | None:
    """A prefill replica, then a decode replica that suits it; None where no usable pair exists.

    A decode replica that lacks the pages for the prompt is taken only if all do.
    """
    weights = weights or Weights()
    usable = sorted((s for s in snapshots if s.usable and s.node_id not in ask.exclude), key=lambda s: s.key)
    colocated = [s for s in usable if s.role is Role.COLOCATED]
    if colocated:
        best = _pick_colocated(colocated, ask, random, weights)
        return Pair(best.node_id, best.node_id, best.replica, best.replica)
    decode = [s for s in usable if s.role is Role.DECODE]
    sources = [s for s in usable if s.role is Role.PREFILL and any(d.takes_from(s) for d in decode)]
    if not sources:
        return None
    source = _one_of_two(sources, partial(_prefill_cost, ask=ask), weights.close_tokens, random)
    targets = _with_room([d for d in decode if d.takes_from(source)], ask)
    load = partial(_decode_cost, source=source, ask=ask, weights=weights)
    target = _one_of_two(targets, load, weights.close_requests, random)
    return Pair(source.node_id, target.node_id, source.replica, target.replica)


def _pick_colocated(nodes: Sequence[NodeSnapshot], ask: Ask, random: Random, weights: Weights) -> NodeSnapshot:
    def cost(node: NodeSnapshot) -> float:
        return _prefill_cost(node, ask) + _requests(node) * weights.close_tokens

    return _one_of_two(_with_room(nodes, ask), cost, weights.close_tokens, random)


def pick_prefill(
    snapshots: Iterable[NodeSnapshot], home: ReplicaKey, ask: Ask, random: Random, weights: Weights | None = None
) -> ReplicaKey | None:
    """Another prefill replica for a request that stays at the decode replica `home`."""
    weights = weights or Weights()
    known = sorted(snapshots, key=lambda s: s.key)
    target = next((s for s in known if s.key == home), None)
    sources = [
        s
        for s in known
        if s.usable
        and s.role is Role.PREFILL
        and s.node_id not in ask.exclude
        and (target is None or target.takes_from(s))
    ]
    if not sources:
        return None
    return _one_of_two(sources, partial(_prefill_cost, ask=ask), weights.close_tokens, random).key


def _one_of_two(
    nodes: Sequence[NodeSnapshot], cost: Callable[[NodeSnapshot], float], margin: float, random: Random
) -> NodeSnapshot:
    """The better of two drawn among those whose cost is close to the least."""
    costs = {node.key: cost(node) for node in nodes}
    least = min(costs.values())
    close = [node for node in nodes if costs[node.key] <= least + max(margin, 0.1 * least)]
    return min(random.sample(close, min(2, len(close))), key=lambda node: costs[node.key])


def _with_room(nodes: Sequence[NodeSnapshot], ask: Ask) -> Sequence[NodeSnapshot]:
    """Those that have the pages for the prompt; all of them if none has."""
    return [s for s in nodes if _pages_wanted(s, ask.missing(s)) <= s.free_pages] or nodes


def _prefill_cost(node: NodeSnapshot, ask: Ask) -> float:
    """Tokens to compute before this prompt is done."""
    return _prefill_load(node) + ask.missing(node)


def _decode_cost(node: NodeSnapshot, source: NodeSnapshot, ask: Ask, weights: Weights) -> float:
    """In requests."""
    cached = 1 - ask.missing(node) / max(1, ask.prompt_tokens)
    on_rail = bool(node.rails & source.rails)
    return _requests(node) - cached * weights.affinity_requests - on_rail * weights.rail_requests


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
        return Pair(best.node_id, best.node_id, best.replica, best.replica)
    decode = [s for s in usable if s.role is Role.DECODE]
    for source in sorted((s for s in usable if s.role is Role.PREFILL), key=lambda s: (_prefill_load(s), s.node_id)):
        targets = [s for s in decode if s.takes_from(source)]
        if targets:
            target = min(targets, key=lambda s: (_decode_load(s, prompt_tokens), s.node_id))
            return Pair(source.node_id, target.node_id, source.replica, target.replica)
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


def _requests(node: NodeSnapshot) -> int:
    return node.running + node.waiting + node.requests_sent


def _pages_wanted(node: NodeSnapshot, tokens: int) -> int:
    """For `tokens` more, and for what was sent there since the snapshot."""
    return -(-tokens // node.page_size) + -(-node.prompt_tokens_sent // node.page_size)


def _decode_load(node: NodeSnapshot, prompt_tokens: int) -> float:
    """Requests there, plus a heavy penalty as the pages run short of this prompt."""
    shortage = max(0, _pages_wanted(node, prompt_tokens) - node.free_pages) / max(1, node.total_pages)
    return _requests(node) + 1_000 * shortage
