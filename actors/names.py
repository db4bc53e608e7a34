"""How actors find each other."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ray

from pdserve.types import NodeId

NAMESPACE = "pdserve"
SCHEDULER = "global-scheduler"
APPLICATION = "pdserve"


@lru_cache(maxsize=1024)
def node_handle(node: NodeId) -> Any:
    """The handle of a node's actor; it stays valid when Ray restarts the actor. Raises ValueError if there is none."""
    return ray.get_actor(node, namespace=NAMESPACE)


def scheduler_handle() -> Any:
    return ray.get_actor(SCHEDULER, namespace=NAMESPACE)
