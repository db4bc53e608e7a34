"""One opened provider (fabric and domain), its memory regions, and its endpoints."""

from __future__ import annotations

import ctypes as c
import logging
import secrets
from typing import Any

from transport.api import DESCRIPTOR_VERSION, Memory, RegionDescriptor
from transport.dll import FabricLibrary
from transport.errors import FabricError
from transport.fabric import abi, calls, info

log = logging.getLogger(__name__)

_KEY_TRIES = 8
_local_names: set[bytes] = set()
"""Names of this process's open endpoints, of all domains."""


class Region:
    """A registered memory region. `handle` is 0 where the provider needs no registration of sources."""

    def __init__(self, memory: Memory, handle: int, descriptor: RegionDescriptor | None = None) -> None:
        self.memory = memory
        self.handle = handle
        self.descriptor = descriptor
        self.desc = calls.region_desc(handle) if handle else 0


class Domain:
    """A provider opened once per process. Not thread-safe: used by one thread only.

    Raises ProviderUnavailable, FabricError.
    """

    def __init__(self, library: FabricLibrary, profile: info.Profile, bind_address: str | None = None) -> None:
        self.library, self.profile = library, profile
        self._info = info.choose(library, profile, bind_address)
        contents = self._info.contents
        attr = contents.domain_attr.contents
        self.mr_mode = int(attr.mr_mode)
        self.tx_depth = int(contents.tx_attr.contents.size)
        self._key_bits = min(8 * int(attr.mr_key_size), 64) - 1
        self._av_type = int(attr.av_type)
        self._fabric, self._domain = 0, 0
        self._regions: set[Region] = set()
        try:
            self._fabric = self._opened(
                "fi_fabric", lambda out: library.lib.fi_fabric(contents.fabric_attr, c.byref(out), None)
            )
            self._domain = self._opened(
                "fi_domain", lambda out: calls.open_domain(self._fabric, self._info.pointer, out)
            )
        except FabricError:
            self.close()
            raise

    def register_source(self, memory: Memory) -> Region:
        """A region that writes may read from; registered only where the provider asks for it."""
        if not self.mr_mode & abi.FI_MR_LOCAL:
            return Region(memory, 0)
        return self._kept(Region(memory, self._register(memory, abi.FI_WRITE)))

    def expose(self, memory: Memory) -> Region:
        """A region that a peer may write to, under a key that nobody can guess."""
        handle = self._register(memory, abi.FI_REMOTE_WRITE)
        base = memory.address if self.mr_mode & abi.FI_MR_VIRT_ADDR else 0
        descriptor = RegionDescriptor(
            DESCRIPTOR_VERSION, self.profile.name, base, memory.length_bytes, calls.region_key(handle)
        )
        return self._kept(Region(memory, handle, descriptor))

    def release(self, region: Region) -> None:
        """Closes the region. Idempotent."""
        if region.handle:
            self._close("fi_close(mr)", region.handle)
            region.handle = 0
            self._regions.discard(region)

    def open_endpoint(self) -> Endpoint:
        return Endpoint(self)

    def close(self) -> None:
        """Its endpoints must be closed before; regions are released here. Idempotent."""
        for region in list(self._regions):
            self.release(region)
        for call, name in (("fi_close(domain)", "_domain"), ("fi_close(fabric)", "_fabric")):
            if getattr(self, name):
                self._close(call, getattr(self, name))
                setattr(self, name, 0)
        self._info.close()

    def _kept(self, region: Region) -> Region:
        self._regions.add(region)
        return region

    def _register(self, memory: Memory, access: int) -> int:
        code = 0
        for _ in range(_KEY_TRIES):
            key = 0 if self.mr_mode & abi.FI_MR_PROV_KEY else secrets.randbits(self._key_bits)
            out = c.c_void_p()
            code = calls.register(self._domain, memory.address, memory.length_bytes, access, key, out)
            if code != -abi.FI_ENOKEY:
                break
        calls.check(self.library, "fi_mr_reg", code, self.profile.name)
        assert out.value is not None
        return out.value

    def _opened(self, call: str, opener: Any) -> int:
        out = c.c_void_p()
        calls.check(self.library, call, opener(out), self.profile.name)
        assert out.value is not None
        return out.value

    def _close(self, call: str, pointer: int) -> None:
        code = calls.close(pointer)
        if code:
            log.warning("%s", calls.fabric_error(self.library, call, code, self.profile.name))


class Endpoint:
    """An endpoint with an address vector and a completion queue of its own. Not thread-safe.

    `ep` and `cq` are what the posting loops take; 0 once closed.
    """

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self.av = self.cq = self.ep = 0
        self.name = b""
        handle, opened = domain._domain, domain._opened
        av_attr = abi.fi_av_attr(type=domain._av_type, count=1)
        cq_attr = abi.fi_cq_attr(size=domain.profile.cq_depth, format=abi.FI_CQ_FORMAT_DATA, wait_obj=abi.FI_WAIT_NONE)
        try:
            self.av = opened("fi_av_open", lambda out: calls.open_av(handle, av_attr, out))
            self.cq = opened("fi_cq_open", lambda out: calls.open_cq(handle, cq_attr, out))
            self.ep = opened("fi_endpoint", lambda out: calls.open_endpoint(handle, domain._info.pointer, out))
            self._check("fi_ep_bind(av)", calls.bind(self.ep, self.av, 0))
            self._check("fi_ep_bind(cq)", calls.bind(self.ep, self.cq, abi.FI_TRANSMIT | abi.FI_RECV))
            self._check("fi_enable", calls.enable(self.ep))
            code, self.name = calls.name_of(self.ep)
            self._check("fi_getname", code)
            _local_names.add(self.name)
        except FabricError:
            self.close()
            raise
        self.writedata = calls.writedata_address(self.ep)
        self.cq_read = calls.cq_read_address(self.cq)

    def insert(self, name: bytes) -> int:
        """Makes a peer's address usable: what writes take as `dest`. Raises FabricError, ValueError."""
        profile = self._domain.profile
        if not profile.within_process and name in _local_names:
            raise ValueError(
                f"{profile.name} connects different processes only: within one, use the loopback transport or tcp"
            )
        out = c.c_uint64(abi.FI_ADDR_NOTAVAIL)
        count = calls.insert_address(self.av, name, out)
        if count != 1:
            raise calls.fabric_error(self._domain.library, "fi_av_insert", count or 22, self._domain.profile.name)
        return out.value

    def close_ep(self) -> None:
        """Ends the endpoint; the completion queue stays readable for what it flushed. Idempotent."""
        if self.ep:
            _local_names.discard(self.name)
            self._domain._close("fi_close(ep)", self.ep)
            self.ep = 0

    def close(self) -> None:
        """Idempotent."""
        self.close_ep()
        for call, name in (("fi_close(cq)", "cq"), ("fi_close(av)", "av")):
            if getattr(self, name):
                self._domain._close(call, getattr(self, name))
                setattr(self, name, 0)

    def _check(self, call: str, code: int) -> None:
        calls.check(self._domain.library, call, code, self._domain.profile.name)
