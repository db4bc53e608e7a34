"""Registration of memory with a NIC: the host's, an accelerator's by its address, an accelerator's through a dmabuf.

The device paths are built from the headers and manual pages; they have not run on hardware yet.
"""

from __future__ import annotations

import ctypes as c
import errno
import mmap
import secrets
from typing import TYPE_CHECKING

from transport.descriptors import Memory
from transport.errors import ProviderUnavailable
from transport.fabric import abi, calls

if TYPE_CHECKING:
    from transport.fabric.domain import Domain

_KEY_TRIES = 8
_LIBC = c.CDLL(None, use_errno=True)
_MS_ASYNC = 1
_DMABUF_SINCE = (1, 20)
_IFACES = {"host": abi.FI_HMEM_SYSTEM, "cuda": abi.FI_HMEM_CUDA}


class Registrar:
    """Registers memory with one domain. Not thread-safe."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        attr = domain.info.contents.domain_attr.contents
        self._key_bits = min(8 * int(attr.mr_key_size), 64) - 1
        self._device_memory = bool(domain.info.contents.caps & abi.FI_HMEM)

    def register(self, memory: Memory, access: int) -> int:
        """The handle of the new region. Raises ValueError, FabricError, ProviderUnavailable."""
        self._check(memory)
        attr, flags, _kept = _attributes(memory, access)
        code = 0
        out = c.c_void_p()
        for _ in range(_KEY_TRIES):
            attr.requested_key = 0 if self._domain.mr_mode & abi.FI_MR_PROV_KEY else secrets.randbits(self._key_bits)
            code = calls.register(self._domain.handle, attr, flags, out)
            if code != -abi.FI_ENOKEY:
                break
        self._domain.check(f"fi_mr_regattr of {_words(memory)}", code)
        assert out.value is not None
        return out.value

    def _check(self, memory: Memory) -> None:
        if memory.length_bytes <= 0 or memory.address <= 0:
            raise ValueError(f"{_words(memory)} cannot be registered: a region needs an address and a positive length")
        if memory.address + memory.length_bytes > 1 << 64:
            raise ValueError(f"{_words(memory)} cannot be registered: it reaches beyond the address space")
        if memory.device.kind == "host" and memory.dmabuf_fd is None and not _is_mapped(memory):
            raise ValueError(f"{_words(memory)} cannot be registered: not all of it is mapped in this process")
        domain = self._domain
        if memory.device.kind != "host" and not self._device_memory:
            raise ProviderUnavailable(
                f"{domain.profile.name} through {domain.nic} cannot register {_words(memory)}: this libfabric "
                f"({domain.library.path}) offers it no FI_HMEM here; copy through host memory, or use an RDMA NIC with "
                f"a libfabric that was built for CUDA"
            )
        if memory.dmabuf_fd is not None and domain.library.version < _DMABUF_SINCE:
            raise ProviderUnavailable(
                f"registration through a dmabuf needs libfabric {'.'.join(map(str, _DMABUF_SINCE))}, "
                f"{domain.library.path} is {'.'.join(map(str, domain.library.version))}"
            )


def _attributes(memory: Memory, access: int) -> tuple[abi.fi_mr_attr, int, object]:
    """What `fi_mr_regattr` takes, its flags, and what must live until the call has returned."""
    attr = abi.fi_mr_attr(iov_count=1, access=access, iface=_IFACES[memory.device.kind])
    if memory.device.kind != "host":
        attr.device = memory.device.index
    place: abi.iovec | abi.fi_mr_dmabuf
    flags = 0
    if memory.dmabuf_fd is None:
        place = abi.iovec(memory.address, memory.length_bytes)
    else:
        place = abi.fi_mr_dmabuf(
            fd=memory.dmabuf_fd,
            offset=memory.dmabuf_offset_bytes,
            len=memory.length_bytes,
            base_addr=memory.address - memory.dmabuf_offset_bytes,
        )
        flags = abi.FI_MR_DMABUF
    attr.mr_iov = c.addressof(place)
    return attr, flags, place


def _is_mapped(memory: Memory) -> bool:
    """Asks the kernel by a call that does nothing else. Providers without registration would find out by a crash."""
    start = memory.address // mmap.PAGESIZE * mmap.PAGESIZE
    code = _LIBC.msync(c.c_void_p(start), c.c_size_t(memory.address + memory.length_bytes - start), _MS_ASYNC)
    return code == 0 or c.get_errno() != errno.ENOMEM


def _words(memory: Memory) -> str:
    through = f" by dmabuf {memory.dmabuf_fd}" if memory.dmabuf_fd is not None else ""
    return f"{memory.length_bytes} bytes of {memory.device} memory at {memory.address:#x}{through}"
