"""How actors find each other, and how their engine replicas are addressed.

A node is one actor. What requests, meetings and handoffs are for is one of its *engine replicas*, which has a card, an
incarnation, pages and links of its own. A replica's address is a `NodeId` too: the node's own where there is but one
replica, else with the replica's number behind it, as in `decode-0.1`. So all that knows only addresses (the messenger,
handoff messages) need not know of replicas, and a message to an address is a call of its node's actor that names the
address. Cards carry addresses; snapshots, and whatever is the whole process's (streams, liveness), carry the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import ray

from pdserve.types import NodeId

NAMESPACE = "pdserve"
SCHEDULER = "global-scheduler"
APPLICATION = "pdserve"
_REPLICA = "."

ReplicaParts = TypeVar("ReplicaParts")


def replica_address(node: NodeId, number: int, count: int) -> NodeId:
    """The address of one of a node's `count` replicas."""
    assert _REPLICA not in node
    return node if count == 1 else NodeId(f"{node}{_REPLICA}{number}")


def node_of(address: NodeId) -> NodeId:
    """The node that a replica belongs to; of a node's name, that name."""
    return NodeId(address.partition(_REPLICA)[0])


def replica_in(replicas: Mapping[NodeId, ReplicaParts], address: NodeId) -> ReplicaParts:
    """Raises LookupError, which says what there is."""
    if address not in replicas:
        raise LookupError(f"no engine replica {address} here, only {', '.join(replicas)}")
    return replicas[address]


@lru_cache(maxsize=1024)
def node_handle(address: NodeId) -> Any:
    """The handle of the actor of a node, or of a replica's node; it stays valid when Ray restarts the actor.

    Raises ValueError if there is none.
    """
    return ray.get_actor(node_of(address), namespace=NAMESPACE)


def scheduler_handle() -> Any:
    return ray.get_actor(SCHEDULER, namespace=NAMESPACE)
