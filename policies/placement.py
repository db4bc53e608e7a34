"""Deployments as data, and the placement-group bundles that they take. Nothing here knows Ray.

A node is one placement group of its own, packed strictly: one bundle per rank, all on one host, the leader's first.
Groups are never nested and none is asked for before all have a host (`assign_hosts`): so either the whole deployment
fits and every group is granted what was set aside for it, or nothing is started. What Ray cannot say of two groups,
that they keep apart, is decided here: every group is pinned to its host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.config import Settings
from pdserve.errors import ClusterTooSmall
from pdserve.types import NodeId, Role
from policies.layout import KvLayout
from policies.packing import Units, spread, units
from policies.sharding import ParallelLayout

STRICT_PACK = "STRICT_PACK"
ACCELERATOR_MARK = 0.001
"""Of the resource `accelerator_type:…`, of which each host has 1: it marks the type, the GPUs are counted as GPU."""

_HOSTS_NAMED = 8

Bundle = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RankResources:
    """What one rank takes of its host.

    `gpu_type` as Ray names it ("H200"); `nic_type` is a custom resource of the cluster, by which the hosts' NICs are
    counted: `ray start --resources='{"nic:efa": 32}'`.
    """

    cpus: float = 1
    gpus: float = 0
    gpu_type: str | None = None
    nics: int = 0
    nic_type: str | None = None

    def bundle(self) -> dict[str, float]:
        wanted: dict[str, float] = {"CPU": self.cpus, "GPU": self.gpus}
        if self.gpu_type is not None:
            wanted[f"accelerator_type:{self.gpu_type}"] = ACCELERATOR_MARK
        if self.nic_type is not None:
            wanted[f"nic:{self.nic_type}"] = self.nics
        return {name: amount for name, amount in wanted.items() if amount}


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes that are all alike; `ep`: a node's ranks share out whole experts."""

    role: Role
    count: int
    parallel: ParallelLayout = field(default_factory=ParallelLayout)
    rank: RankResources = field(default_factory=RankResources)
    ep: bool = False

    def bundles(self) -> tuple[Bundle, ...]:
        return tuple(self.rank.bundle() for _ in range(self.parallel.ranks))

    def demand(self) -> Units:
        """Of one node, on one host."""
        return units(self.rank.bundle(), self.parallel.ranks)


@dataclass(frozen=True, slots=True)
class Deployment:
    """`name` is what a message calls it; every kind has nodes."""

    name: str
    kinds: tuple[NodeKind, ...]

    def amount(self, resource: str) -> float:
        """What all nodes take of it together."""
        return sum(kind.count * kind.parallel.ranks * kind.rank.bundle().get(resource, 0) for kind in self.kinds)


def deployment_of(settings: Settings) -> Deployment:
    """What the settings ask for."""
    wanted, layout = settings.deployment, KvLayout(settings.engine.kv_layout)
    nodes = {Role.PREFILL: wanted.prefill, Role.DECODE: wanted.decode, Role.COLOCATED: wanted.colocated}
    kinds = tuple(
        NodeKind(
            role=role,
            count=kind.count,
            parallel=ParallelLayout(kind.tp, layout, kind.dp),
            rank=RankResources(kind.cpus, kind.gpus, kind.gpu_type, kind.nics, kind.nic_type),
            ep=kind.ep,
        )
        for role, kind in nodes.items()
        if kind.count
    )
    return Deployment(wanted.preset or "this deployment", kinds)


@dataclass(frozen=True, slots=True)
class Host:
    """One host of the cluster, and what is free there now. `name` is for people, `id` is unique."""

    id: str
    free: Bundle
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.id


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """The placement group of one node: its bundles, all on `host`."""

    name: NodeId
    role: Role
    bundles: tuple[Bundle, ...]
    host: str
    strategy: str = STRICT_PACK


def node_name(role: Role, number: int) -> NodeId:
    """Of the nodes of a role, that with this number, from 0 on."""
    return NodeId(f"{role}-{number}")


def assign_hosts(deployment: Deployment, hosts: Sequence[Host]) -> tuple[NodeGroup, ...]:
    """A host for every node, the nodes spread as far as the hosts go. Raises ClusterTooSmall at once."""
    demands = [kind.demand() for kind in deployment.kinds]
    found = spread(demands, [kind.count for kind in deployment.kinds], [units(host.free) for host in hosts])
    if found.missing:
        raise ClusterTooSmall(_too_small(deployment, hosts, found.missing))
    numbers: Counter[Role] = Counter()
    groups = []
    for k, kind in enumerate(deployment.kinds):
        for host, counts in zip(hosts, found.counts, strict=True):
            for _ in range(counts[k]):
                name = node_name(kind.role, numbers[kind.role])
                groups.append(NodeGroup(name, kind.role, kind.bundles(), host.id))
                numbers[kind.role] += 1
    return tuple(groups)


def _too_small(deployment: Deployment, hosts: Sequence[Host], missing: Sequence[int]) -> str:
    lacking = []
    for kind, count in zip(deployment.kinds, missing, strict=True):
        if count:
            ranks = kind.parallel.ranks
            bundles = f"{ranks} bundle{'s' if ranks > 1 else ''} of {{{_amounts(kind.rank.bundle())}}}"
            lacking.append(f"no room for {count} of {kind.count} {kind.role} nodes, each {bundles} on one host")
    names = sorted({name for kind in deployment.kinds for name in kind.rank.bundle()})
    free = [f"{host} {_amounts({name: host.free.get(name, 0) for name in names})}" for host in hosts[:_HOSTS_NAMED]]
    more = f" and {len(hosts) - _HOSTS_NAMED} hosts more" if len(hosts) > _HOSTS_NAMED else ""
    there = ("free now: " + "; ".join(free) + more) if hosts else "the cluster has no host"
    return f"the cluster is too small for {deployment.name}: {'; '.join(lacking)} ({there})"


def _amounts(bundle: Bundle) -> str:
    return ", ".join(f"{name}: {amount:g}" for name, amount in bundle.items())
