"""Finds and loads libfabric on first use, and remembers which one was taken.

Order: an explicit path; the system's (vendors of NICs install their own, which is the right one there); the one that
the `mpich` wheel brings. A system library older than 1.18 yields to the wheel's: before that version, the provider
that is called `tcp` today had another name and fewer repairs.

The wheel's library finds its plugins (verbs, efa) by itself: they lie beside it. They need Debian's `libibverbs1`,
`librdmacm1` and `ibverbs-providers`, or what the NIC's vendor installs in their place.
"""

from __future__ import annotations

import _ctypes
import ctypes
import logging
import os
import sys
import sysconfig
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transport.errors import LibraryMissing

log = logging.getLogger(__name__)

ADVICE = "install it with `pip install mpich` (brings libfabric 2.x) or your NIC vendor's libfabric package"
_SONAME = "libfabric.so.1"
_PREFERRED = (1, 18)
_RDMA_DEVICES = Path("/sys/class/infiniband")
_WHEEL_PLUGINS = {"verbs;ofi_rxm": "libverbs-fi.so", "efa": "libefa-fi.so"}

_SETTINGS = {
    # Peers per endpoint. Ours have one, or as many as the peer has NICs; the default of 256 makes ofi_rxm ask for
    # completion queues that soft RoCE cannot have.
    "FI_UNIVERSE_SIZE": "16",
    # verbs and efa keep registrations in a cache: then one region has one key for all peers, and closing it does not
    # revoke the key. `Domain` refuses a provider whose cache is on all the same.
    "FI_MR_CACHE_MAX_COUNT": "0",
    # The longest two-sided message that ofi_rxm copies at once, ours being shorter. Its default of 16 KiB pins 34 MiB
    # for every connected endpoint.
    "FI_OFI_RXM_BUFFER_SIZE": "4096",
    # Within a host, EFA would hand writes to shm, which reports no death and lets the receiver pull.
    "FI_EFA_ENABLE_SHM_TRANSFER": "0",
}
"""libfabric reads its settings from the environment, once, at its first call. What is set already stands."""

_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "fi_version": (ctypes.c_uint32, []),
    "fi_getinfo": (
        ctypes.c_int,
        [ctypes.c_uint32, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p],
    ),
    "fi_freeinfo": (None, [ctypes.c_void_p]),
    "fi_dupinfo": (ctypes.c_void_p, [ctypes.c_void_p]),
    "fi_fabric": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]),
    "fi_strerror": (ctypes.c_char_p, [ctypes.c_int]),
}


@dataclass(frozen=True, slots=True)
class FabricLibrary:
    """A loaded libfabric with its exported functions typed. `reason` says why this one was taken."""

    path: str
    version: tuple[int, int]
    lib: Any
    reason: str = ""

    def __str__(self) -> str:
        reason = f", {self.reason}" if self.reason else ""
        return f"libfabric {'.'.join(map(str, self.version))} ({self.path}{reason})"

    def strerror(self, code: int) -> str:
        text: bytes | None = self.lib.fi_strerror(code)
        return text.decode() if text else f"unknown error {code}"


_loaded: dict[str | None, FabricLibrary] = {}
_lock = threading.Lock()


def load_libfabric(path: str | None = None) -> FabricLibrary:
    """The library at `path`, or the best that this machine has. Raises LibraryMissing."""
    with _lock:
        if path not in _loaded:
            library = _open(path, "as configured") if path is not None else _search()
            log.info("%s", library)
            _loaded[path] = library
        return _loaded[path]


def wheel_candidates() -> list[Path]:
    """Where the `mpich` wheel puts its library, for the layouts that installers use."""
    site = Path(sysconfig.get_path("purelib"))
    roots = [Path(sys.prefix) / "lib", *(parent for parent in list(site.parents)[:3]), site / "mpich.libs"]
    return list(dict.fromkeys(root / "mpich" / _SONAME for root in roots))


def remedy(library: FabricLibrary, provider: str) -> str:
    """What to do about a provider that `library` does not offer, as the end of a sentence; "" if there is no advice."""
    wheel = _wheel()
    plugin = _WHEEL_PLUGINS.get(provider)
    if plugin and not any(_RDMA_DEVICES.glob("*")):
        return "; the kernel has no RDMA device (`ibv_devices` lists them)"
    if wheel is None or not (plugin is None or (wheel.parent / "libfabric" / plugin).exists()):
        return ""
    if library.path != str(wheel):
        return f"; the mpich wheel's library has it: configure {wheel}"
    if plugin and not _loads("librdmacm.so.1"):
        return "; the plugin needs Debian's libibverbs1, librdmacm1 and ibverbs-providers, or your NIC vendor's"
    return ""


def _wheel() -> Path | None:
    return next((candidate for candidate in wheel_candidates() if candidate.exists()), None)


def _loads(soname: str) -> bool:
    try:
        ctypes.CDLL(soname)
    except OSError:
        return False
    return True


def _search() -> FabricLibrary:
    wheel = _wheel()
    try:
        system: FabricLibrary | None = _open(_SONAME, "the system's")
    except LibraryMissing:
        system = None
    if system is not None and (system.version >= _PREFERRED or wheel is None):
        return system
    if wheel is None:
        raise LibraryMissing(f"libfabric is neither on the system ({_SONAME}) nor in this environment; {ADVICE}")
    reason = "the mpich wheel's: the system has none"
    if system is not None:
        reason = f"the mpich wheel's: the system's {'.'.join(map(str, system.version))} is too old"
        _ctypes.dlclose(system.lib._handle)
    return _open(str(wheel), reason)


def _open(path: str, reason: str) -> FabricLibrary:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        lib = ctypes.CDLL(path)
    except OSError as error:
        raise LibraryMissing(f"cannot load libfabric from {path}: {error}; {ADVICE}") from error
    for name, (result, arguments) in _PROTOTYPES.items():
        try:
            function = getattr(lib, name)
        except AttributeError as error:
            raise LibraryMissing(f"{path} is no libfabric: it lacks {name}; {ADVICE}") from error
        function.restype, function.argtypes = result, arguments
    version = lib.fi_version()
    return FabricLibrary(_real_path(path), (version >> 16, version & 0xFFFF), lib, reason)


def _real_path(path: str) -> str:
    """The file behind a bare soname, as the loader found it."""
    if "/" in path:
        return path
    with open("/proc/self/maps") as maps:
        files = [line.split(None, 5)[5].strip() for line in maps if "libfabric.so" in line]
    return files[-1] if files else path
