"""What wires this machine has, and how one of them is opened: the settings' side of `transport.choice`."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.config import TransportSettings
from transport.api import Transport
from transport.choice import RDMA_PROVIDERS
from transport.dll import load_libfabric
from transport.errors import LibraryMissing
from transport.fabric.info import available
from transport.open import open_transport
from transport.topology import fabric_nics, read_topology
from transport.ucx.dll import load_libucp


@dataclass(frozen=True, slots=True)
class Wires:
    """`rdma`: those of `providers` that have an active device; `nics`: these devices."""

    providers: tuple[str, ...] = ()
    rdma: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()


def find_wires(settings: TransportSettings) -> Wires:
    """What can be opened here. Raises LibraryMissing.

    UCX is looked for only if it is asked for, or if there is no libfabric: to load it changes a process, which then
    has UCX's signal handlers.
    """
    if settings.provider == "ucx":
        load_libucp(settings.libucp)
        return Wires(("ucx",))
    try:
        providers = available(load_libfabric(settings.libfabric))
    except LibraryMissing:
        if settings.provider != "auto" or not _has_ucx(settings):
            raise
        return Wires(("ucx",))
    nics = fabric_nics(read_topology())
    kinds = {"efa" if nic.link_layer == "EFA" else "verbs;ofi_rxm" for nic in nics}
    rdma = tuple(provider for provider in RDMA_PROVIDERS if provider in providers and provider in kinds)
    return Wires(providers, rdma, tuple(nic.name for nic in nics))


def open_wire(settings: TransportSettings, provider: str) -> Transport:
    """Raises LibraryMissing, ProviderUnavailable, FabricError."""
    return open_transport(
        provider,
        nics=None if settings.nics is None else tuple(settings.nics),
        library=settings.libfabric,
        ucx_library=settings.libucp,
        spin=settings.spin,
    )


def _has_ucx(settings: TransportSettings) -> bool:
    try:
        load_libucp(settings.libucp)
    except LibraryMissing:
        return False
    return True
