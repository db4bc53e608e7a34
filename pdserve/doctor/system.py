"""What the checks look at: this machine, or one that a test made up."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pdserve.config import Settings
from pdserve.doctor.libraries import Libraries, find_libraries
from transport.topology import Topology, read_topology

PACKAGES = ("ray", "numba", "mpich")
RDMA_LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1")
"""What libfabric's verbs provider loads. EFA's own libfabric needs the first of them."""


@dataclass(frozen=True, slots=True)
class ShmSpace:
    """Bytes of the file system at /dev/shm."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class System:
    """Facts, gathered once. `settings` are what the nodes of this machine would be started with."""

    settings: Settings
    sys_root: Path
    proc_root: Path
    dev_root: Path
    topology: Topology
    libraries: Libraries
    packages: Mapping[str, str]
    """Versions of those of PACKAGES that are installed."""
    rdma_libraries: frozenset[str]
    """Those of RDMA_LIBRARIES that load."""
    python: tuple[int, int, int]
    affinity: frozenset[int]
    """CPUs that this process may run on."""
    memlock_bytes: int | None
    """What this process may lock in memory; None: without limit."""
    shm: ShmSpace | None
    """None: there is no /dev/shm."""
    environment: Mapping[str, str]
    port_fault: Callable[[str, int], str]
    """(host, port) to the reason why one cannot listen there; "" if one can."""

    @property
    def shm_folder(self) -> Path:
        return self.dev_root / "shm"

    @property
    def kernel(self) -> tuple[int, int]:
        """(0, 0) if unknown."""
        try:
            major, minor = self.proc("sys/kernel/osrelease").split(".")[:2]
            return int(major), int("".join(c for c in minor if c.isdigit()))
        except ValueError:
            return 0, 0

    @property
    def has_rdma(self) -> bool:
        """Whether the kernel knows an RDMA device, software ones included."""
        return bool(self.topology.nics)

    def proc(self, path: str) -> str:
        """A file under /proc without white space at its ends; "" if there is none."""
        try:
            return (self.proc_root / path).read_text(errors="replace").strip()
        except OSError:
            return ""


def this_system(settings: Settings, library: str | None = None) -> System:
    """`library`: the path of libfabric, instead of what the settings say."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return System(
        settings=settings,
        sys_root=Path("/sys"),
        proc_root=Path("/proc"),
        dev_root=Path("/dev"),
        topology=read_topology(),
        libraries=find_libraries(library or settings.transport.libfabric),
        packages=_packages(),
        rdma_libraries=frozenset(filter(_loads, RDMA_LIBRARIES)),
        python=sys.version_info[:3],
        affinity=frozenset(os.sched_getaffinity(0)),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        shm=_shm_space(Path("/dev/shm")),
        environment=dict(os.environ),
        port_fault=port_fault,
    )


def port_fault(host: str, port: int) -> str:
    """Why one cannot listen there; "" if one can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _shm_space(folder: Path) -> ShmSpace | None:
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None
    return ShmSpace(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)
