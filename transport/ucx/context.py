"""UCX opened once per transport: its configuration, and the memory that it knows."""

from __future__ import annotations

import ctypes as c
import os

from transport.api import Memory
from transport.errors import FabricError, ProviderUnavailable
from transport.ucx import abi, calls
from transport.ucx.dll import UcxLibrary
from transport.ucx.posting import function_table

_REVOKING = frozenset({"tcp"})
"""Transports of UCX where the receiver's own process places every byte: with its sockets closed, nothing lands."""

_SETTINGS = {"RNDV_THRESH": "inf", "PROTOS": "^put/am*"}
"""UCX's way of putting by active messages ends the *receiver's process* where its answer meets a connection that the
writer has closed (1.13 to 1.23). So it is excluded; and without rendezvous, which active messages here never use, tcp
offers in its place what reads from the socket straight into the target, also to endpoints that handle errors."""


class Region:
    """Memory mapped for UCX; `handle` is 0 where that is not needed. `param` is the address of the request
    parameters that puts from it take, 0 for none."""

    def __init__(self, memory: Memory, handle: int = 0) -> None:
        self.memory, self.handle = memory, handle
        self._param = abi.ucp_request_param_t(op_attr_mask=abi.UCP_OP_ATTR_FIELD_MEMH, memh=handle)
        self.param = c.addressof(self._param) if handle else 0


class Context:
    """Not thread-safe: used by one thread only. Raises ProviderUnavailable, FabricError.

    `tls` are UCX's names of transports, `nics` those of network devices (None: all that there are).
    """

    def __init__(self, library: UcxLibrary, tls: tuple[str, ...], nics: tuple[str, ...] | None) -> None:
        self.library, self.tls, self.nics = library, tls, nics
        self.table = function_table(library)
        self.handle = 0
        self._regions: set[Region] = set()
        self.handle = self._opened()
        try:
            self._memory_types = self._queried()
        except FabricError:
            self.close()
            raise

    @property
    def revokes(self) -> bool:
        """See `transport.api.Transport.revokes`."""
        return _REVOKING.issuperset(self.tls)

    @property
    def nic(self) -> str:
        """The network devices, for errors."""
        return ",".join(self.nics) if self.nics else ""

    def register_source(self, memory: Memory) -> Region:
        """Memory that puts read from. Sockets need no mapping of it."""
        self._check_device(memory)
        if self.revokes and memory.device.kind == "host":
            return Region(memory)
        return self.map(memory)

    def map(self, memory: Memory) -> Region:
        """Raises FabricError, ProviderUnavailable."""
        self._check_device(memory)
        device = abi.UCS_MEMORY_TYPE_CUDA if memory.device.kind == "cuda" else abi.UCS_MEMORY_TYPE_HOST
        fields = (
            abi.UCP_MEM_MAP_PARAM_FIELD_ADDRESS
            | abi.UCP_MEM_MAP_PARAM_FIELD_LENGTH
            | abi.UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE
        )
        params = abi.ucp_mem_map_params(
            field_mask=fields, address=memory.address, length=memory.length_bytes, memory_type=device
        )
        out = c.c_void_p()
        status = self.library.lib.ucp_mem_map(self.handle, c.byref(params), c.byref(out))
        calls.check(self.library, "ucp_mem_map", status)
        region = Region(memory, out.value or 0)
        self._regions.add(region)
        return region

    def packed_key(self, region: Region) -> bytes:
        """What a peer unpacks to put into `region`. Raises FabricError."""
        buffer, size = c.c_void_p(), c.c_size_t()
        lib = self.library.lib
        status = lib.ucp_rkey_pack(self.handle, region.handle, c.byref(buffer), c.byref(size))
        calls.check(self.library, "ucp_rkey_pack", status)
        assert buffer.value is not None
        key = c.string_at(buffer.value, size.value)
        lib.ucp_rkey_buffer_release(buffer)
        return key

    def release(self, region: Region) -> None:
        """Idempotent. Raises FabricError."""
        if region.handle:
            handle, region.handle = region.handle, 0
            self._regions.discard(region)
            calls.check(self.library, "ucp_mem_unmap", self.library.lib.ucp_mem_unmap(self.handle, handle))

    def close(self) -> None:
        """Its UCX workers must be destroyed before; regions are released here. Idempotent."""
        for region in list(self._regions):
            self.release(region)
        if self.handle:
            self.library.lib.ucp_cleanup(self.handle)
            self.handle = 0

    def _check_device(self, memory: Memory) -> None:
        if memory.device.kind == "cuda" and not self._memory_types >> abi.UCS_MEMORY_TYPE_CUDA & 1:
            raise ProviderUnavailable(
                f"{memory.device} memory needs UCX's CUDA transports, which {self.library.path} does not offer with "
                f"tls={','.join(self.tls)}: install pdserve[ucx-cuda] and name 'cuda_copy' among tls"
            )

    def _opened(self) -> int:
        lib, config = self.library.lib, c.c_void_p()
        calls.check(self.library, "ucp_config_read", lib.ucp_config_read(None, None, c.byref(config)))
        try:
            self._set(config, "TLS", ",".join(self.tls))
            for name, value in _SETTINGS.items():
                self._set(config, name, value)
            if self.nics is not None:
                self._set(config, "NET_DEVICES", ",".join(self.nics))
            params = abi.ucp_params(
                field_mask=abi.UCP_PARAM_FIELD_FEATURES | abi.UCP_PARAM_FIELD_NAME,
                features=abi.UCP_FEATURE_RMA | abi.UCP_FEATURE_AM | abi.UCP_FEATURE_WAKEUP,
                name=b"pdserve",
            )
            out = c.c_void_p()
            status = lib.ucp_init_version(*abi.API_VERSION, c.byref(params), config, c.byref(out))
        finally:
            lib.ucp_config_release(config)
        if status == abi.UCS_ERR_NO_DEVICE:
            raise ProviderUnavailable(self._absence(status))
        calls.check(self.library, "ucp_init", status)
        assert out.value is not None
        return out.value

    def _queried(self) -> int:
        """The kinds of memory that it takes, one bit each."""
        attr = abi.ucp_context_attr(field_mask=abi.UCP_ATTR_FIELD_MEMORY_TYPES)
        status = self.library.lib.ucp_context_query(self.handle, c.byref(attr))
        calls.check(self.library, "ucp_context_query", status)
        return int(attr.memory_types)

    def _set(self, config: c.c_void_p, name: str, value: str) -> None:
        status = self.library.lib.ucp_config_modify(config, name.encode(), value.encode())
        if status < 0:
            raise ProviderUnavailable(f"UCX takes no {name}={value!r}: {self.library.strerror(status)}")

    def _absence(self, status: int) -> str:
        version = ".".join(map(str, self.library.version))
        devices = f" on {', '.join(self.nics)}" if self.nics else ""
        there = ", ".join(sorted(os.listdir("/sys/class/net")))
        return (
            f"UCX {version} ({self.library.path}) offers none of {', '.join(self.tls)}{devices} here: "
            f"{self.library.strerror(status)}; network interfaces of this machine: {there}"
        )


def opened(library: UcxLibrary, tls: tuple[str, ...], nics: tuple[str, ...] | None) -> Context:
    """Raises ValueError, ProviderUnavailable, FabricError."""
    for kind, names in (("tls", tls), ("nics", nics)):
        if names is not None and (not names or not all(names) or any("," in name for name in names)):
            raise ValueError(f"{kind} must name at least one, without commas, not {names!r}")
    return Context(library, tls, nics)


__all__ = ["Context", "FabricError", "Region", "opened"]
