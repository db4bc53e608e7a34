"""One NIC, opened with one provider (fabric and domain), and the memory registered with it."""

from __future__ import annotations

import ctypes as c
import logging
from contextlib import suppress
from typing import Any

import numpy as np

from transport.descriptors import Memory
from transport.dll import FabricLibrary
from transport.errors import FabricError, ProviderUnavailable, TransportError
from transport.fabric import abi, calls
from transport.fabric.info import Offer
from transport.fabric.profiles import Profile
from transport.fabric.registration import Registrar

log = logging.getLogger(__name__)

local_names: set[bytes] = set()
"""Names of this process's open endpoints, of all domains."""


class Region:
    """Memory as one NIC knows it. `handle` is 0 where the provider needs no registration, and once released.

    `desc` is what posts take as the local descriptor. Of an exposed region, `key` (8 bytes, little-endian) and `base`
    (what remote offsets are added to) are for the peer: one descriptor carries the keys of all NICs of a link.
    """

    __slots__ = ("base", "desc", "handle", "key", "memory")

    def __init__(self, memory: Memory, handle: int = 0, key: bytes = b"", base: int = 0) -> None:
        self.memory, self.handle, self.key, self.base = memory, handle, key, base
        self.desc = calls.region_desc(handle) if handle else 0


class Domain:
    """A NIC opened once per transport. Takes the offer over. Not thread-safe: used by one thread only.

    `handle`, `fabric` and `info` are what calls take. Raises FabricError.
    """

    def __init__(self, library: FabricLibrary, profile: Profile, offer: Offer, rail: int = 0) -> None:
        self.library, self.profile, self.offer, self.rail = library, profile, offer, rail
        attr = offer.contents.domain_attr.contents
        self.mr_mode = int(attr.mr_mode)
        self.av_type = int(attr.av_type)
        self.tx_depth = min(int(offer.contents.tx_attr.contents.size), profile.cq_depth // 2)
        """Writes that one endpoint may have in flight: they leave room in its queue for as many of the peer."""
        self.max_write_bytes = int(offer.contents.ep_attr.contents.max_msg_size)
        """A longer write is refused by the provider: it must be cut."""
        self.fabric = self.handle = 0
        self._regions: set[Region] = set()
        try:
            self.fabric = self.opened(
                "fi_fabric", lambda out: library.lib.fi_fabric(offer.contents.fabric_attr, c.byref(out), None)
            )
            self.handle = self.opened("fi_domain", lambda out: calls.open_domain(self.fabric, self.info, out))
            self._registrar = Registrar(self)
            self._refuse_cached_keys()
        except TransportError:
            self.close()
            raise

    @property
    def nic(self) -> str:
        """The device's name, or the address where the provider runs over ordinary network interfaces."""
        return self.offer.nic

    @property
    def info(self) -> Any:
        """The `fi_info` that the domain was opened with, and its endpoints are."""
        return self.offer.pointer

    @property
    def local_registration(self) -> bool:
        """Whether what writes and messages read from, and messages arrive in, must be registered."""
        return bool(self.mr_mode & abi.FI_MR_LOCAL)

    def register_source(self, memory: Memory) -> Region:
        """A region that writes may read from; registered only where the provider asks for it.

        Raises FabricError, ProviderUnavailable (device memory that it cannot register).
        """
        return self._local(memory, abi.FI_WRITE)

    def register_buffers(self, memory: Memory) -> Region:
        """A region that messages are sent from and received in, and that writes without a payload name as their source;
        registered only where the provider asks for it."""
        return self._local(memory, abi.FI_SEND | abi.FI_RECV | abi.FI_WRITE)

    def expose(self, memory: Memory) -> Region:
        """A region that a peer may write to, under a key that nobody can guess or that the NIC drew.

        Raises FabricError, ProviderUnavailable (device memory that it cannot register).
        """
        handle = self._registrar.register(memory, abi.FI_REMOTE_WRITE)
        base = memory.address if self.mr_mode & abi.FI_MR_VIRT_ADDR else 0
        return self._kept(Region(memory, handle, calls.region_key(handle).to_bytes(8, "little"), base))

    def release(self, region: Region) -> None:
        """Closes the region. Idempotent. Raises FabricError if it may still be open to a peer."""
        if region.handle:
            error = self.close_object("fi_close(mr)", region.handle)
            region.handle = 0
            self._regions.discard(region)
            if error is not None:
                raise error

    def close(self) -> None:
        """Its endpoints must be closed before; regions are released here. Idempotent."""
        for region in list(self._regions):
            with suppress(FabricError):  # logged
                self.release(region)
        for call, name in (("fi_close(domain)", "handle"), ("fi_close(fabric)", "fabric")):
            if getattr(self, name):
                self.close_object(call, getattr(self, name))
                setattr(self, name, 0)
        self.offer.close()

    def opened(self, call: str, opener: Any) -> int:
        """The object that `opener(out)` puts into `out`. Raises FabricError, naming `call`."""
        out = c.c_void_p()
        self.check(call, opener(out))
        assert out.value is not None
        return out.value

    def close_object(self, call: str, pointer: int) -> FabricError | None:
        """The error, logged, if it would not close."""
        code = calls.close(pointer)
        if not code:
            return None
        error = self.error(call, code)
        log.warning("%s", error)
        return error

    def check(self, call: str, code: int) -> int:
        """Passes a count or zero on. Raises FabricError."""
        if code < 0:
            raise self.error(call, code)
        return code

    def error(self, call: str, code: int, peer: str = "", posted: bool = False) -> FabricError:
        """The error for `code`, with provider and NIC; see `calls.fabric_error`."""
        where = calls.Place(self.profile.name, self.nic, peer)
        return calls.fabric_error(self.library, call, code, where, posted)

    def _refuse_cached_keys(self) -> None:
        """A cache of registrations gives all peers one key, which outlives the region: nothing could be revoked."""
        if not self.mr_mode & abi.FI_MR_PROV_KEY:
            return
        page = np.zeros(4096, np.uint8)
        memory = Memory(int(page.ctypes.data), page.nbytes)
        first, second = self.expose(memory), self.expose(memory)
        same = first.key == second.key
        for region in (first, second):
            self.release(region)
        if same:
            raise ProviderUnavailable(
                f"{self.profile.name} on {self.nic} keeps a cache of registrations, so that a peer's access could not "
                "be revoked: set FI_MR_CACHE_MAX_COUNT=0 before the process starts (libfabric was in use already)"
            )

    def _local(self, memory: Memory, access: int) -> Region:
        if not self.local_registration and memory.device.kind == "host":
            return Region(memory)
        return self._kept(Region(memory, self._registrar.register(memory, access)))

    def _kept(self, region: Region) -> Region:
        self._regions.add(region)
        return region
