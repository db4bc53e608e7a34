"""Nodes of several engine replicas in one process, which share the transports and all ranks' registered memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.messenger.meeting import Replica
from pdserve.types import NodeId, Role
from tests.pdserve.messenger.pair import DecodeSide, Network, PrefillSide, Process
from tests.pdserve.messenger.sharded import ShardedToy


def add_prefill_replicas(network: Network, name: str, models: list[ShardedToy], **of: Any) -> list[PrefillSide]:
    return [network.join_prefill(side) for side in _sides(network, PrefillSide, Role.PREFILL, name, models, of)]


def add_decode_replicas(network: Network, name: str, models: list[ShardedToy]) -> list[DecodeSide]:
    of = {"handoff": network.handoff, "slots": network.slots}
    return [network.join_decode(side) for side in _sides(network, DecodeSide, Role.DECODE, name, models, of)]


def _sides(
    network: Network, make: Callable[..., Any], role: Role, name: str, models: list[ShardedToy], of: dict[str, Any]
) -> list[Any]:
    count = len(models)
    process = Process(models[0], network.settings, network.open_tapped, count)
    return [
        make(
            NodeId(f"{name}.{number}"), role, model, network.settings, network.provider, network.open_tapped,
            replica=Replica(number, count), process=process, **of,
        )
        for number, model in enumerate(models)
    ]  # fmt: skip
