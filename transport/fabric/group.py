"""Which NICs a transport opens: the ones that were named, or the best there is."""

from __future__ import annotations

import ipaddress
import logging
import socket
from pathlib import Path

from transport.dll import FabricLibrary
from transport.errors import ProviderUnavailable, TransportError
from transport.fabric.domain import Domain
from transport.fabric.info import Offer, Query, offers
from transport.fabric.profiles import PROFILES, Profile
from transport.topology import Topology, fabric_nics, read_topology

log = logging.getLogger(__name__)

_CUDA_DRIVER = Path("/proc/driver/nvidia/version")


def open_domains(library: FabricLibrary, profile: Profile, nics: tuple[str, ...] | None = None) -> list[Domain]:
    """One domain per NIC, by rail.

    `nics` None: the provider's best interface, but all active RDMA devices that may carry blocks. Named NICs, by
    device, address, or network (`10.0.0.0/24`: the first with an address in it, which reads alike on every host), are
    opened all or none. Raises ProviderUnavailable, naming what there is; FabricError.
    """
    if nics is not None and not nics:
        raise ProviderUnavailable("an empty list of NICs: name at least one, or leave the setting out")
    topology = read_topology()
    chosen = _best(library, profile, topology) if nics is None else _named(library, profile, nics)
    rails = _rails(chosen, profile, topology)
    domains: list[Domain] = []
    try:
        for rail, offer in sorted(zip(rails, chosen, strict=True), key=lambda pair: pair[0]):
            domains.append(Domain(library, profile, offer, rail))
    except TransportError:
        for domain in domains:
            domain.close()
        for offer in chosen:
            offer.close()
        raise
    return domains


def rdma_nics(library: FabricLibrary) -> dict[str, tuple[str, ...]]:
    """By RDMA provider the NICs that it would open by itself: what `transport.choice` goes by.

    Without RDMA done in software (rxe, siw): that is slower than TCP, so it is taken where it is configured only.
    """
    topology = read_topology()
    software = {nic.name for nic in topology.nics if nic.is_software}
    found = {}
    for profile in PROFILES.values():
        if profile.reach != "rdma":
            continue
        try:
            best = _best(library, profile, topology)
        except ProviderUnavailable:
            continue
        names = tuple(offer.nic for offer in best if offer.nic not in software)
        _keep(best, [])
        if names:
            found[profile.name] = names
    return found


def _best(library: FabricLibrary, profile: Profile, topology: Topology) -> list[Offer]:
    found = _offers(library, profile)
    if profile.reach != "rdma":
        return _keep(found, found[:1])
    names = {nic.name for nic in fabric_nics(topology)}
    up = [offer for offer in found if not offer.down]
    carrying = [offer for offer in up if offer.nic in names] or up
    if not carrying:
        there = ", ".join(offer.nic for offer in found)
        _keep(found, [])
        raise ProviderUnavailable(f"{profile.name}: no port of any RDMA device is up; there are: {there}")
    return _keep(found, carrying)


def _named(library: FabricLibrary, profile: Profile, nics: tuple[str, ...]) -> list[Offer]:
    if profile.reach == "host":
        raise ProviderUnavailable(f"{profile.name} works within one host and has no NICs to choose: leave them out")
    chosen: list[Offer] = []
    try:
        for nic in nics:
            offer = _find(library, profile, nic)
            twin = any((other.device, other.nic) == (offer.device, offer.nic) for other in chosen)
            chosen.append(offer)
            if twin:
                raise ProviderUnavailable(f"NIC {nic!r} is named twice: it is {offer.nic} of {offer.device}")
    except ProviderUnavailable:
        _keep(chosen, [])
        raise
    return chosen


def _find(library: FabricLibrary, profile: Profile, nic: str) -> Offer:
    if _is_address(nic):
        if not _is_ours(nic):
            raise ProviderUnavailable(
                f"no interface of this machine has the address {nic}; where nodes are on several hosts, name the "
                "interface, or the network that all are reached in, such as 10.0.0.0/24"
            )
        found = _offers(library, profile, nic)
        return _keep(found, found[:1])[0]
    found = _offers(library, profile)
    there = dict.fromkeys(f"{offer.device} ({offer.address})" if offer.address else offer.nic for offer in found)
    matching = [offer for offer in found if nic in (offer.device, offer.nic) or _is_within(offer.address, nic)]
    _keep(found, matching[:1])
    if not matching:
        raise ProviderUnavailable(f"{profile.name} has no NIC {nic!r} on this machine; it has: {', '.join(there)}")
    return matching[0]


def _offers(library: FabricLibrary, profile: Profile, address: str = "") -> list[Offer]:
    """With registration of device memory where an NVIDIA driver is loaded and the provider can."""
    if profile.reach != "host" and _CUDA_DRIVER.exists():
        try:
            return offers(library, Query(profile, address, device_memory=True))
        except ProviderUnavailable as error:
            log.info("%s", error)
    return offers(library, Query(profile, address))


def _keep(found: list[Offer], kept: list[Offer]) -> list[Offer]:
    """Closes the others."""
    for offer in found:
        if offer not in kept:
            offer.close()
    return kept


def _rails(chosen: list[Offer], profile: Profile, topology: Topology) -> list[int]:
    """Of RDMA devices the position in the node, alike on nodes of one make; else the position in the list."""
    known = {nic.name: nic.rail for nic in topology.nics} if profile.reach == "rdma" else {}
    rails = [known.get(offer.nic, -1) for offer in chosen]
    return list(range(len(chosen))) if -1 in rails or len(set(rails)) < len(rails) else rails


def _is_address(nic: str) -> bool:
    try:
        ipaddress.ip_address(nic)
    except ValueError:
        return False
    return True


def _is_within(address: str, network: str) -> bool:
    try:
        return "/" in network and ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)
    except ValueError:  # it has no address, or a device is meant
        return False


def _is_ours(address: str) -> bool:
    """libfabric takes a foreign address here and fails later, saying less."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
