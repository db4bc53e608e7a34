"""libfabric's inline functions, redone over the ops tables, and the one place where return codes are read."""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass
from typing import Any

from transport.dll import FabricLibrary
from transport.errors import FabricError, PeerLost
from transport.fabric import abi

_LOST = frozenset({32, 100, 101, 103, 104, 107, 108, 110, 111, 112, 113, 121})
"""Error numbers that mean the peer cannot be reached: EPIPE, ENETDOWN … EHOSTUNREACH, EREMOTEIO."""

_LOST_WRITE = frozenset({abi.FI_ECANCELED, 2, 5})
"""The same for a write that was posted: flushed with its connection; ENOENT and EIO (`sockets`)."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call was made: for the error. `peer` is the name that it was given."""

    provider: str
    nic: str = ""
    peer: str = ""


def fabric_error(
    library: FabricLibrary, call: str, code: int, where: Place | str = "", posted: bool = False
) -> FabricError:
    """The error for `code` (of either sign); `where` is a place or just a provider.

    `posted`: of a write, where more numbers mean a lost peer.
    """
    code = abs(code)
    lost = code in _LOST or (posted and code in _LOST_WRITE)
    place = Place(where) if isinstance(where, str) else where
    kind = PeerLost if lost else FabricError
    return kind(call, code, library.strerror(code), place.provider, place.peer, nic=place.nic)


def _ops(pointer: int, kind: Any, field: str = "ops") -> Any:
    return getattr(c.cast(pointer, c.POINTER(kind)).contents, field).contents


def _fid_ops(pointer: int) -> Any:
    return c.cast(pointer, c.POINTER(abi.fid)).contents.ops.contents


def close(pointer: int) -> int:
    return int(_fid_ops(pointer).close(pointer))


def bind(pointer: int, other: int, flags: int) -> int:
    return int(_fid_ops(pointer).bind(pointer, other, flags))


def enable(endpoint: int) -> int:
    return int(_fid_ops(endpoint).control(endpoint, abi.FI_ENABLE, None))


def open_domain(fabric: int, info: Any, out: Any) -> int:
    return int(_ops(fabric, abi.fid_fabric).domain(fabric, info, c.byref(out), None))


def open_av(domain: int, attr: abi.fi_av_attr, out: Any) -> int:
    return int(_ops(domain, abi.fid_domain).av_open(domain, c.byref(attr), c.byref(out), None))


def open_cq(domain: int, attr: abi.fi_cq_attr, out: Any) -> int:
    return int(_ops(domain, abi.fid_domain).cq_open(domain, c.byref(attr), c.byref(out), None))


def open_endpoint(domain: int, info: Any, out: Any) -> int:
    return int(_ops(domain, abi.fid_domain).endpoint(domain, info, c.byref(out), None))


def register(domain: int, attr: abi.fi_mr_attr, flags: int, out: Any) -> int:
    return int(_ops(domain, abi.fid_domain, "mr").regattr(domain, c.byref(attr), flags, c.byref(out)))


def region_key(region: int) -> int:
    return int(c.cast(region, c.POINTER(abi.fid_mr)).contents.key)


def region_desc(region: int) -> int:
    return int(c.cast(region, c.POINTER(abi.fid_mr)).contents.mem_desc or 0)


def insert_address(av: int, name: bytes, out: Any) -> int:
    """1 when inserted, 0 or negative when not."""
    return int(_ops(av, abi.fid_av).insert(av, c.c_char_p(name), 1, c.byref(out), 0, None))


def name_of(endpoint: int) -> tuple[int, bytes]:
    """(return code, address of the endpoint)."""
    size = c.c_size_t(512)
    buffer = c.create_string_buffer(size.value)
    code = int(_ops(endpoint, abi.fid_ep, "cm").getname(endpoint, buffer, c.byref(size)))
    return code, buffer.raw[: size.value]


def writedata_address(endpoint: int) -> int:
    return abi.address_of(_ops(endpoint, abi.fid_ep, "rma").writedata)


def send_address(endpoint: int) -> int:
    """Of a function of `abi.SEND`'s shape."""
    return abi.address_of(_ops(endpoint, abi.fid_ep, "msg").send)


def recv_address(endpoint: int) -> int:
    """Of a function of `abi.RECV`'s shape."""
    return abi.address_of(_ops(endpoint, abi.fid_ep, "msg").recv)


def cq_read_address(cq: int) -> int:
    return abi.address_of(_ops(cq, abi.fid_cq).read)


def read_error(cq: int) -> tuple[int, abi.fi_cq_err_entry]:
    """(return code, the entry): the next error of a completion queue."""
    entry = abi.fi_cq_err_entry()
    return int(_ops(cq, abi.fid_cq).readerr(cq, c.byref(entry), 0)), entry


def wait_fd(cq: int) -> tuple[int, int]:
    """(return code, the file descriptor that becomes readable): of a queue that was opened with FI_WAIT_FD."""
    fd = c.c_int(-1)
    return int(_fid_ops(cq).control(cq, abi.FI_GETWAIT, c.byref(fd))), fd.value


def trywait_address(fabric: int) -> int:
    """Of a function of `abi.TRYWAIT`'s shape."""
    return abi.address_of(_ops(fabric, abi.fid_fabric).trywait)
