"""Placement groups: what a deployment takes of a Ray cluster, asked for as a whole and given back as a whole.

One group per node, pinned to the host that `policies.placement` chose for it: nothing is asked for before all nodes
have a host. A group that has lost its host is placed anew by Ray wherever there is room.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import ray
from ray._private.state import available_resources_per_node  # Ray's public interface has only the cluster's sum
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.names import NAMESPACE
from pdserve.errors import ClusterTooSmall
from pdserve.types import NodeId
from policies.placement import Deployment, Host, NodeGroup, assign_hosts

GRANT_S = 3.0
"""Groups that fit are granted within milliseconds, unless somebody else is faster."""
SETTLE_S = 1.5
"""Until what was given back a moment ago is counted as free."""


def find_groups(deployment: Deployment) -> tuple[NodeGroup, ...]:
    """A host for every node, by what is free in the cluster that this process has joined; hosts yet to be added to it
    do not count. Raises ClusterTooSmall.
    """
    until = time.monotonic() + SETTLE_S
    while True:
        try:
            return assign_hosts(deployment, _hosts(available_resources_per_node()))
        except ClusterTooSmall:
            if time.monotonic() > until or not _fits_when_idle(deployment):
                raise
        time.sleep(0.1)


class Placement:
    """The placement groups of all nodes; `close()` gives them back, and ends whatever still runs in them.

    Raises ClusterTooSmall; then no group is left.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._groups: dict[NodeId, PlacementGroup] = {}
        try:
            for group in find_groups(deployment):
                self._groups[group.name] = _ask(group)
            self._await_grant(deployment)
        except BaseException:
            self.close()
            raise

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(self._groups)

    def leader(self, node: NodeId) -> dict[str, Any]:
        """Ray's options for a node's actor: it takes the first bundle; the others are its ranks'."""
        return in_bundle(self._groups[node], 0)

    def hosts(self) -> dict[NodeId, str]:
        """Ray's id of the host that each node is on now; "" while it is being placed anew."""
        return {node: _host(group) for node, group in self._groups.items()}

    def close(self) -> None:
        """Idempotent."""
        groups, self._groups = self._groups, {}
        for group in groups.values() if ray.is_initialized() else ():
            with suppress(RayError):  # the cluster is gone, and its groups with it
                remove_placement_group(group)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _await_grant(self, deployment: Deployment) -> None:
        until = time.monotonic() + GRANT_S
        late = [node for node, group in self._groups.items() if not group.wait(max(0.0, until - time.monotonic()))]
        if late:
            raise ClusterTooSmall(
                f"the cluster has become too small for {deployment.name}: somebody else took, a moment ago, "
                f"what was free for {', '.join(late)}; try again when it is free"
            )


def in_bundle(group: PlacementGroup, index: int) -> dict[str, Any]:
    """Ray's options for an actor that takes all that one bundle of a group holds."""
    held = dict(group.bundle_specs[index])
    return {
        "num_cpus": held.pop("CPU", 0),
        "num_gpus": held.pop("GPU", 0),
        "resources": held,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
        ),
    }


def _ask(group: NodeGroup) -> PlacementGroup:
    return placement_group(
        [dict(bundle) for bundle in group.bundles],
        strategy=group.strategy,
        name=f"{NAMESPACE}-{group.name}",
        _soft_target_node_id=group.host,  # a hard one would keep a node from ever leaving a host that died
    )


def _host(group: PlacementGroup) -> str:
    return str(placement_group_table(group)["bundles_to_node_id"].get(0, ""))


def _hosts(free: Mapping[str, Mapping[str, float]]) -> list[Host]:
    return [
        Host(node["NodeID"], free.get(node["NodeID"], {}), node["NodeManagerAddress"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def _fits_when_idle(deployment: Deployment) -> bool:
    try:
        assign_hosts(deployment, _hosts({node["NodeID"]: node["Resources"] for node in ray.nodes()}))
    except ClusterTooSmall:
        return False
    return True
