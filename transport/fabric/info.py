"""What `fi_getinfo` offers for a profile: one offer per NIC, owned copies of libfabric's records."""

from __future__ import annotations

import ctypes as c
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transport.dll import FabricLibrary, remedy
from transport.errors import ProviderUnavailable
from transport.fabric import abi, calls
from transport.fabric.profiles import PROFILES, Profile, library_name

_LIBC = c.CDLL(None)
_LIBC.strdup.restype = c.c_void_p
_FAMILIES = {abi.FI_SOCKADDR_IN: socket.AF_INET, abi.FI_SOCKADDR_IN6: socket.AF_INET6}
_CAPS = abi.FI_MSG | abi.FI_RMA | abi.FI_WRITE | abi.FI_REMOTE_WRITE | abi.FI_SEND | abi.FI_RECV
_IMM_BYTES = 4
_OTHER_ENDPOINTS = ("-xrc", "-dgrm", "-dgram")
"""How the names of further entries of a device end that are the same NIC with another kind of queue."""


@dataclass(frozen=True, slots=True)
class Query:
    """What is looked for: all NICs, or those with this IP address. `device_memory`: only with FI_HMEM."""

    profile: Profile
    address: str = ""
    device_memory: bool = False


class Offer:
    """One `fi_info`, owned. `pointer` is valid until `close`."""

    def __init__(self, library: FabricLibrary, profile: Profile, pointer: Any) -> None:
        self._library, self._reach = library, profile.reach
        self.pointer = pointer
        self.device = _text(self.contents.domain_attr.contents.name)
        """What the provider calls it: `eth0`, `mlx5_0`, `rdmap0s6-rdm`."""
        self.address = _address(self.contents)
        """Its IP address; "" where it is named otherwise."""

    @property
    def contents(self) -> Any:
        return self.pointer.contents

    @property
    def nic(self) -> str:
        return (self.address if self._reach == "network" else "") or self.device.removesuffix("-rdm")

    @property
    def speed_gbps(self) -> float:
        """0 where the provider does not tell."""
        link = self._link
        return int(link.speed) / 1e9 if link is not None else 0.0

    @property
    def down(self) -> bool:
        link = self._link
        return link is not None and link.state == abi.FI_LINK_DOWN

    @property
    def device_memory(self) -> bool:
        return bool(self.contents.caps & abi.FI_HMEM)

    @property
    def _link(self) -> Any | None:
        nic = self.contents.nic
        return nic.contents.link_attr.contents if nic and nic.contents.link_attr else None

    def close(self) -> None:
        if self.pointer:
            self._library.lib.fi_freeinfo(self.pointer)
            self.pointer = None


def offers(library: FabricLibrary, query: Query) -> list[Offer]:
    """One offer per NIC and IP address, best first: IPv4 before others, loopback last. The caller closes them.

    Raises ProviderUnavailable if there is none.
    """
    profile = query.profile
    code, found = _getinfo(library, query)
    best: dict[tuple[str, str], Any] = {}
    for info in sorted((info for info in _chain(found) if _suits(info, library, profile)), key=_rank):
        name = _text(info.domain_attr.contents.name)
        best.setdefault((name, _address(info) if profile.reach == "network" else ""), info)
    copies = [c.cast(library.lib.fi_dupinfo(c.byref(info)), c.POINTER(abi.fi_info)) for info in best.values()]
    if found:
        library.lib.fi_freeinfo(found)
    if not copies:
        raise ProviderUnavailable(_absence(library, query, code or -abi.FI_ENODATA))
    return [Offer(library, profile, copy) for copy in copies]


def available(library: FabricLibrary) -> tuple[str, ...]:
    """The profiles that this machine can open."""
    names = []
    for name, profile in PROFILES.items():
        _, found = _getinfo(library, Query(profile))
        if any(_suits(info, library, profile) for info in _chain(found)):
            names.append(name)
        if found:
            library.lib.fi_freeinfo(found)
    return tuple(names)


def _getinfo(library: FabricLibrary, query: Query) -> tuple[int, Any]:
    """(return code, the first of the chain, to be freed)."""
    hints = c.cast(library.lib.fi_dupinfo(None), c.POINTER(abi.fi_info))
    _fill(hints.contents, library, query)
    found = c.POINTER(abi.fi_info)()
    node = query.address.encode() or None
    flags = abi.FI_SOURCE if node else 0
    version = min(library.version, query.profile.api_version)
    code = library.lib.fi_getinfo(version[0] << 16 | version[1], node, None, flags, hints, c.byref(found))
    library.lib.fi_freeinfo(hints)
    return int(code), found


def _fill(hints: Any, library: FabricLibrary, query: Query) -> None:
    profile = query.profile
    hints.caps = _CAPS | (abi.FI_HMEM if query.device_memory else 0)
    hints.mode = abi.FI_CONTEXT | abi.FI_CONTEXT2
    hints.ep_attr.contents.type = abi.FI_EP_RDM
    domain = hints.domain_attr.contents
    domain.mr_mode = profile.mr_modes | (abi.FI_MR_HMEM if query.device_memory else 0)
    domain.threading = abi.FI_THREAD_DOMAIN
    domain.data_progress = abi.FI_PROGRESS_MANUAL
    hints.fabric_attr.contents.prov_name = _LIBC.strdup(library_name(profile, library).encode())


def _suits(info: Any, library: FabricLibrary, profile: Profile) -> bool:
    """Some libraries list neighbours of the provider that was asked for, or what cannot carry our immediates."""
    fabric = info.fabric_attr.contents
    return (
        _text(fabric.prov_name) == library_name(profile, library)
        and _text(fabric.name) not in profile.other_fabrics
        and not _text(info.domain_attr.contents.name).endswith(_OTHER_ENDPOINTS)
        and info.domain_attr.contents.cq_data_size >= _IMM_BYTES
    )


def _chain(first: Any) -> Iterator[Any]:
    while first:
        yield first.contents
        first = first.contents.next


def _text(pointer: int | None) -> str:
    return c.string_at(pointer).decode(errors="replace") if pointer else ""


def _address(info: Any) -> str:
    """The IP address that the interface is bound to."""
    family = _FAMILIES.get(info.addr_format)
    if family is None or not info.src_addr:
        return ""
    at, length = (4, 4) if family == socket.AF_INET else (8, 16)
    return socket.inet_ntop(family, c.string_at(info.src_addr + at, length))


def _rank(info: Any) -> tuple[bool, bool]:
    address = _address(info)
    return info.addr_format != abi.FI_SOCKADDR_IN, address.startswith("127.") or address == "::1"


def _absence(library: FabricLibrary, query: Query, code: int) -> str:
    where = f" with address {query.address}" if query.address else ""
    if query.device_memory:
        return f"{library} offers {query.profile.name!r}{where} without device memory"
    error = calls.fabric_error(library, "fi_getinfo", code, query.profile.name)
    advice = remedy(library, query.profile.name)
    return f"{library} offers no provider {query.profile.name!r}{where} here: {error.strerror}{advice}"
