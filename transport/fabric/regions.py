"""Memory as the NICs of a transport know it: what writes read from, and what a link's peer may write to."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from transport.descriptors import Memory
from transport.errors import FabricError, ProviderUnavailable, TransportError
from transport.fabric.domain import Domain, Region
from transport.transfer import TransferState, retire

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Nic:
    """One NIC of a transport; `index` is its place among them. `posted` counts the writes that went through it."""

    index: int
    domain: Domain
    posted: int = 0

    @property
    def name(self) -> str:
        return self.domain.nic


class FabricSource:
    """Implements `transport.api.SourceRegion`. `users` are the transfers that read from it.

    `regions` has one entry per NIC; None where that one could not register it.
    """

    def __init__(self, memory: Memory, regions: list[Region | None]) -> None:
        self._memory, self.regions = memory, regions
        self.users: set[TransferState] = set()
        self.retired = False

    @property
    def memory(self) -> Memory:
        return self._memory


def register_source(nics: list[Nic], memory: Memory) -> FabricSource:
    """Registers it with every NIC that can. Raises FabricError if none can, ProviderUnavailable (no such memory)."""
    regions: list[Region | None] = []
    failure: TransportError | None = None
    for nic in nics:
        try:
            regions.append(nic.domain.register_source(memory))
        except (FabricError, ProviderUnavailable) as error:
            regions.append(None)
            failure = error
    if failure is not None:
        if not any(regions):
            raise failure
        log.warning("a source is not read through every NIC: %s", failure)
    return FabricSource(memory, regions)


def release_source(nics: list[Nic], source: FabricSource) -> None:
    """Idempotent. Raises RegionBusy while something reads from it."""
    retire(source)
    for nic, region in zip(nics, source.regions, strict=True):
        if region is not None:
            nic.domain.release(region)
