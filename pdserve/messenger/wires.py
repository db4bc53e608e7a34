"""What wires this machine has, and how one of them is opened: the settings' side of `transport.choice`."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.config import TransportSettings
from transport.api import Transport
from transport.choice import RDMA_PROVIDERS
from transport.dll import load_libfabric
from transport.errors import LibraryMissing
from transport.fabric.group import rdma_nics
from transport.fabric.info import available
from transport.fabric.profiles import WITHIN_HOST
from transport.open import open_transport
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
    has UCX's signal handlers. So of two nodes of which only one has libfabric, both must be told `ucx` to meet.
    """
    if settings.provider == "ucx":
        load_libucp(settings.libucp)
        return Wires(("ucx",))
    try:
        library = load_libfabric(settings.libfabric)
        providers = available(library)
    except LibraryMissing:
        if settings.provider != "auto" or settings.libfabric is not None or not _has_ucx(settings):
            raise
        return Wires(("ucx",))
    found = _allowed(rdma_nics(library), settings.nics)
    rdma = tuple(provider for provider in RDMA_PROVIDERS if provider in found)
    return Wires(providers, rdma, tuple(nic for provider in rdma for nic in found[provider]))


def open_wire(settings: TransportSettings, provider: str) -> Transport:
    """Raises LibraryMissing, ProviderUnavailable, FabricError."""
    return open_transport(
        provider,
        # What stays within the host has no NICs, whatever the settings say of the wire to other hosts.
        nics=None if settings.nics is None or provider in WITHIN_HOST else tuple(settings.nics),
        library=settings.libfabric,
        ucx_library=settings.libucp,
        spin=settings.spin,
    )


def _allowed(found: dict[str, tuple[str, ...]], names: list[str] | None) -> dict[str, tuple[str, ...]]:
    """Without the NICs that the settings leave out, and the providers that have none then."""
    kept = {provider: tuple(n for n in nics if names is None or n in names) for provider, nics in found.items()}
    return {provider: nics for provider, nics in kept.items() if nics}


def _has_ucx(settings: TransportSettings) -> bool:
    try:
        load_libucp(settings.libucp)
    except LibraryMissing:
        return False
    return True
