"""Finds and loads libucp on first use, and remembers which one was taken.

Order: an explicit path; the system's (it knows the machine's NICs); `libucx-cu12`'s, which brings CUDA; the one of the
`mpich` wheel. A system library older than 1.20 is passed over: before 1.19, tcp with error handling puts by active
messages alone, which can end the receiver's process (see `transport.ucx.context`).
"""

from __future__ import annotations

import ctypes as c
import logging
import os
import subprocess
import sys
import sysconfig
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transport.dll import wheel_candidates
from transport.errors import LibraryMissing
from transport.ucx import abi

log = logging.getLogger(__name__)

ADVICE = "`pip install mpich` brings UCX 1.20, `pip install libucx-cu12` 1.22 with CUDA; or name the path of another"
_SONAME = "libucp.so.0"
_OLDEST = (1, 20)
_PROBE = f"""
import ctypes
lib, version = ctypes.CDLL({_SONAME!r}), [ctypes.c_uint() for _ in range(3)]
lib.ucp_get_version(*map(ctypes.byref, version))
print(version[0].value, version[1].value)
"""


@dataclass(frozen=True, slots=True)
class UcxLibrary:
    """A loaded libucp with its exported functions typed."""

    path: str
    version: tuple[int, int]
    lib: Any

    def strerror(self, status: int) -> str:
        text: bytes | None = self.lib.ucs_status_string(status)
        return text.decode() if text else f"unknown status {status}"


_loaded: dict[str | None, UcxLibrary] = {}
_lock = threading.Lock()


def load_libucp(path: str | None = None) -> UcxLibrary:
    """The library at `path`, or the best that this machine has.

    Raises LibraryMissing, also if the process has another libucp already: two would share the first one's libucs.
    """
    with _lock:
        if path not in _loaded:
            library = _search() if path is None else _open(path)
            log.info("libucp %d.%d from %s", *library.version, library.path)
            _loaded[path] = library
        return _loaded[path]


def candidates() -> list[str]:
    """What may be taken, best first: the system's if it is new enough, then those of the wheels that are installed."""
    site = Path(sysconfig.get_path("purelib"))
    mpich = [fabric.with_name(_SONAME) for fabric in wheel_candidates()]
    wheels = [str(wheel) for wheel in (site / "libucx" / "lib" / _SONAME, *mpich) if wheel.exists()]
    return [_SONAME, *wheels] if system_version() >= _OLDEST else wheels


@cache
def system_version() -> tuple[int, int]:
    """Of the library on the loader's path; (0, 0) if there is none.

    Asked in a process of its own: what a library that is not taken has loaded would stay, and serve another one badly.
    """
    done = subprocess.run([sys.executable, "-I", "-c", _PROBE], capture_output=True, text=True, check=False)
    try:
        major, minor = map(int, done.stdout.split())
    except ValueError:
        return 0, 0
    return major, minor


def _search() -> UcxLibrary:
    for other in _loaded.values():
        return other
    for candidate in candidates():
        return _open(candidate)
    version = system_version()
    there = f"the system's is {version[0]}.{version[1]}, too old" if any(version) else "there is none on the system"
    raise LibraryMissing(f"libucp {_OLDEST[0]}.{_OLDEST[1]} or newer cannot be found: {there}; {ADVICE}")


def _open(path: str) -> UcxLibrary:
    for other in _loaded.values():
        if os.path.realpath(path) == os.path.realpath(other.path):
            return other
        raise LibraryMissing(f"{path} cannot be loaded: this process uses {other.path} already, and one is all it can")
    try:
        lib = c.CDLL(path)
    except OSError as error:
        raise LibraryMissing(f"cannot load libucp from {path}: {error}; {ADVICE}") from error
    return _typed(path, lib)


def _typed(path: str, lib: Any) -> UcxLibrary:
    for name, (result, arguments) in abi.PROTOTYPES.items():
        try:
            function = getattr(lib, name)
        except AttributeError as error:
            raise LibraryMissing(f"{path} is no libucp: it lacks {name}; {ADVICE}") from error
        function.restype, function.argtypes = result, arguments
    version = [c.c_uint() for _ in range(3)]
    lib.ucp_get_version(*map(c.byref, version))
    found = (version[0].value, version[1].value)
    if found < _OLDEST:
        raise LibraryMissing(
            f"{path} is libucp {found[0]}.{found[1]}, older than 1.20: start anew with another; {ADVICE}"
        )
    _quieten(lib)
    return UcxLibrary(_real_path(path), found, lib)


def _quieten(lib: Any) -> None:
    """UCX prints what goes wrong on stdout; all of it comes back as a status, too. Who asked for its log keeps it."""
    if "UCX_LOG_LEVEL" not in os.environ and hasattr(lib, "ucs_global_opts_set_value"):
        lib.ucs_global_opts_set_value(b"LOG_LEVEL", b"fatal")


def _real_path(path: str) -> str:
    """The file behind a bare soname, as the loader found it."""
    if "/" in path:
        return path
    with open("/proc/self/maps") as maps:
        files = [line.split(None, 5)[5].strip() for line in maps if "libucp.so" in line]
    return files[-1] if files else path
