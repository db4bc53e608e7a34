"""Deployments as data, and the placement-group bundles that they take. Nothing here knows Ray.

A node is one placement group of its own, packed strictly: one bundle per rank, all on one host, the leader's first.
Groups are never nested and none is asked for before all have a host (`assign_hosts`): so either the whole deployment
fits and every group is granted what was set aside for it, or nothing is started. What Ray cannot say of two groups,
that they keep apart, is decided here: every group is pinned to its host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pdserve.errors import ClusterTooSmall, ConfigError
from pdserve.types import Role
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
    """Nodes that are all alike."""

    role: Role
    count: int
    parallel: ParallelLayout = field(default_factory=ParallelLayout)
    rank: RankResources = field(default_factory=RankResources)

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        fields = {"count": (self.count, 0), "tp": (self.parallel.tp, 1), "dp": (self.parallel.dp, 1)}
        for name, (given, least) in fields.items():
            if given < least:
                raise ConfigError(f"{self.role} nodes: {name} is {given}, allowed: at least {least}")
        if self.rank.nics and self.rank.nic_type is None:
            raise ConfigError(
                f"{self.role} nodes: nics is {self.rank.nics} without a nic_type; "
                "name the custom resource that counts the hosts' NICs"
            )

    def bundles(self) -> tuple[Bundle, ...]:
        return tuple(self.rank.bundle() for _ in range(self.parallel.ranks))

    def demand(self) -> Units:
        """Of one node, on one host."""
        return units(self.rank.bundle(), self.parallel.ranks)


@dataclass(frozen=True, slots=True)
class Deployment:
    name: str
    kinds: tuple[NodeKind, ...]

    def with_counts(self, **counts: int) -> Deployment:
        """Other numbers of nodes, by role: `with_counts(decode=4)`."""
        return replace(
            self, kinds=tuple(replace(kind, count=counts.get(str(kind.role), kind.count)) for kind in self.kinds)
        )

    def with_rank(self, rank: RankResources) -> Deployment:
        """Other resources, the same for every rank."""
        return replace(self, kinds=tuple(replace(kind, rank=rank) for kind in self.kinds))


@dataclass(frozen=True, slots=True)
class Host:
    """One host of the cluster, and what is free there now."""

    id: str
    free: Bundle


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """The placement group of one node: its bundles, all on `host`."""

    name: str
    role: Role
    bundles: tuple[Bundle, ...]
    host: str
    strategy: str = STRICT_PACK


_GPU_RANK = RankResources(cpus=2, gpus=1)  # one core computes and launches, one moves pages
_TP8, _DP8 = ParallelLayout(tp=8), ParallelLayout(dp=8)

PRESETS: Mapping[str, Deployment] = {
    "local": Deployment("local", (NodeKind(Role.PREFILL, 1), NodeKind(Role.DECODE, 1))),
    "qwen-tp": Deployment(
        "qwen-tp", (NodeKind(Role.PREFILL, 1, _TP8, _GPU_RANK), NodeKind(Role.DECODE, 3, _TP8, _GPU_RANK))
    ),
    "r1-tp": Deployment(
        "r1-tp", (NodeKind(Role.PREFILL, 1, _TP8, _GPU_RANK), NodeKind(Role.DECODE, 3, _TP8, _GPU_RANK))
    ),
    # A TP8 prefill node gives about 3 requests a second, a DP8 decode node takes 1 a second and rank (capacity.py).
    "r1-dp": Deployment(
        "r1-dp", (NodeKind(Role.PREFILL, 3, _TP8, _GPU_RANK), NodeKind(Role.DECODE, 1, _DP8, _GPU_RANK))
    ),
}


def preset(name: str) -> Deployment:
    """Raises ConfigError, naming what there is."""
    if name not in PRESETS:
        raise ConfigError(f"no deployment preset {name!r}; allowed: {', '.join(PRESETS)}")
    return PRESETS[name]


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
                groups.append(NodeGroup(f"{kind.role}-{numbers[kind.role]}", kind.role, kind.bundles(), host.id))
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
    free = [f"{host.id} {_amounts({name: host.free.get(name, 0) for name in names})}" for host in hosts[:_HOSTS_NAMED]]
    more = f" and {len(hosts) - _HOSTS_NAMED} hosts more" if len(hosts) > _HOSTS_NAMED else ""
    there = ("free now: " + "; ".join(free) + more) if hosts else "the cluster has no host"
    return f"the cluster is too small for {deployment.name}: {'; '.join(lacking)} ({there})"


def _amounts(bundle: Bundle) -> str:
    return ", ".join(f"{name}: {amount:g}" for name, amount in bundle.items())
