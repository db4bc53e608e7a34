"""Provider profiles: what is asked of each provider, what it promises, and the choice of one of its interfaces."""

from __future__ import annotations

import ctypes as c
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transport.dll import FabricLibrary
from transport.errors import ProviderUnavailable
from transport.fabric import abi, calls

_MR_MODES = abi.FI_MR_LOCAL | abi.FI_MR_VIRT_ADDR | abi.FI_MR_ALLOCATED | abi.FI_MR_PROV_KEY
_LIBC = c.CDLL(None)
_LIBC.strdup.restype = c.c_void_p


@dataclass(frozen=True, slots=True)
class Profile:
    """What the engine must know about a provider beyond what `fi_getinfo` tells.

    Whether remote addresses are offsets or virtual addresses and who chooses keys is *not* here: that is what
    came back in `mr_mode`, and the descriptor carries its consequences.
    """

    name: str
    """As the settings say it; the same on both sides, whatever the library calls the provider."""
    reports_death: bool
    """Writes towards a killed peer fail. Where not, the caller must learn it otherwise and close the link."""
    receiver_pulls: bool
    """The *receiver* copies the payload out of the sender's memory, while it polls. A link that closes with writes in
    flight waits `linger_s` for them first: a peer that is stopped for longer and then goes on may still read the
    source memory, so that memory must not be reused until the peer is known to be dead or has closed its link."""
    linger_s: float = 0.0
    within_process: bool = True
    """Two links of one process may be connected. Where not, the provider hands both the same mapping and a close of
    one crashes the other (libfabric 2.5 shm), so that is refused."""
    cq_depth: int = 4096
    by_host: bool = False
    """Has network interfaces to choose from, so `bind_address` means something."""


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("tcp", reports_death=True, receiver_pulls=False, by_host=True),
        Profile("tcp;ofi_rxm", reports_death=True, receiver_pulls=False, by_host=True),
        Profile("sockets", reports_death=True, receiver_pulls=False, by_host=True),
        Profile("shm", reports_death=False, receiver_pulls=True, linger_s=0.25, within_process=False),
    )
}

_LATER = ("verbs", "verbs;ofi_rxm", "efa", "efa-direct")
"""The seat for RDMA NICs: their profiles need local registration, one rma_iov and a NIC choice."""


def profile_named(name: str) -> Profile:
    """Raises ProviderUnavailable for a provider that has no profile."""
    profile = PROFILES.get(name)
    if profile is not None:
        return profile
    known = ", ".join(PROFILES)
    if name in _LATER:
        raise ProviderUnavailable(f"provider {name!r} is planned but not supported by this version; choose of: {known}")
    raise ProviderUnavailable(f"unknown provider {name!r}; choose of: {known}")


def library_name(profile: Profile, library: FabricLibrary) -> str:
    """What this library calls the provider. Until 1.17 today's `tcp` was `net`, and `tcp` meant `tcp;ofi_rxm`."""
    if profile.name == "tcp" and library.version < (1, 18):
        return "net"
    return profile.name


class Info:
    """One `fi_info`, owned. `pointer` is valid until `close`."""

    def __init__(self, library: FabricLibrary, pointer: Any) -> None:
        self._library = library
        self.pointer = pointer

    @property
    def contents(self) -> Any:
        return self.pointer.contents

    def close(self) -> None:
        if self.pointer:
            self._library.lib.fi_freeinfo(self.pointer)
            self.pointer = None


def choose(library: FabricLibrary, profile: Profile, bind_address: str | None = None) -> Info:
    """The provider's best interface: the one with `bind_address` if given, else IPv4 before IPv6, loopback last.

    Raises ProviderUnavailable, naming what there is.
    """
    name = library_name(profile, library)
    if bind_address is not None and profile.by_host and not _is_ours(bind_address):
        raise ProviderUnavailable(f"no interface of this machine has the address {bind_address}")
    hints = _hints(library, name)
    found = c.POINTER(abi.fi_info)()
    node = bind_address.encode() if bind_address and profile.by_host else None
    flags = abi.FI_SOURCE if node else 0
    code = library.lib.fi_getinfo(abi.API_VERSION, node, None, flags, hints.pointer, c.byref(found))
    hints.close()
    if code < 0 or not found:
        raise ProviderUnavailable(_absence(library, profile, name, code, bind_address))
    offers = [info for info in _chain(found) if _provider(info) == name]
    chosen = None
    if offers:
        best = min(offers, key=_rank)
        chosen = Info(library, c.cast(library.lib.fi_dupinfo(c.byref(best)), c.POINTER(abi.fi_info)))
    library.lib.fi_freeinfo(found)
    if chosen is None:
        raise ProviderUnavailable(_absence(library, profile, name, -abi.FI_ENODATA, bind_address))
    return chosen


def available(library: FabricLibrary) -> tuple[str, ...]:
    """The profiles that this machine can open."""
    names = []
    for name, profile in PROFILES.items():
        try:
            choose(library, profile).close()
        except ProviderUnavailable:
            continue
        names.append(name)
    return tuple(names)


def _hints(library: FabricLibrary, name: str) -> Info:
    info = Info(library, c.cast(library.lib.fi_dupinfo(None), c.POINTER(abi.fi_info)))
    hints = info.contents
    hints.caps = abi.FI_MSG | abi.FI_RMA | abi.FI_WRITE | abi.FI_REMOTE_WRITE | abi.FI_SEND | abi.FI_RECV
    hints.mode = abi.FI_CONTEXT | abi.FI_CONTEXT2
    hints.ep_attr.contents.type = abi.FI_EP_RDM
    domain = hints.domain_attr.contents
    domain.mr_mode = _MR_MODES
    domain.threading = abi.FI_THREAD_DOMAIN
    domain.data_progress = abi.FI_PROGRESS_MANUAL
    hints.fabric_attr.contents.prov_name = _LIBC.strdup(name.encode())
    return info


def _is_ours(address: str) -> bool:
    """libfabric takes a foreign address here and fails later, saying less."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _chain(first: Any) -> Iterator[Any]:
    while first:
        yield first.contents
        first = first.contents.next


def _provider(info: Any) -> str:
    return c.string_at(info.fabric_attr.contents.prov_name).decode()


def _rank(info: Any) -> tuple[bool, bool]:
    ipv6 = info.addr_format == abi.FI_SOCKADDR_IN6
    loopback = False
    if info.addr_format == abi.FI_SOCKADDR_IN and info.src_addr:
        loopback = c.string_at(info.src_addr, 8)[4] == 127
    return ipv6, loopback


def _absence(library: FabricLibrary, profile: Profile, name: str, code: int, bind_address: str | None) -> str:
    where = f" with address {bind_address}" if bind_address else ""
    error = calls.fabric_error(library, "fi_getinfo", code, name)
    version = ".".join(map(str, library.version))
    return f"libfabric {version} ({library.path}) offers no provider {profile.name!r}{where} here: {error.strerror}"
