"""Machines for the doctor's tests: /sys, /proc and /dev under a temporary folder, and whatever else a check reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdserve.config import Settings
from pdserve.doctor.libraries import Libraries, Library
from pdserve.doctor.system import RDMA_LIBRARIES, ShmSpace, System
from tests.transport import fake_sysfs
from transport.topology import read_topology

GIB = 1 << 30
FABRIC = Library("system", "/usr/lib/libfabric.so.1", "2.5", ("tcp", "shm", "verbs;ofi_rxm", "efa"))
UCP = Library("system", "/usr/lib/libucp.so.0", "1.20.1")
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15"
MEMORY = "MemTotal: 1000 kB\nHugePages_Total:       0\nHugepagesize:       2048 kB"


class Machine:
    """`system()` is what the checks see. `write_proc` and `sysfs` change it before."""

    def __init__(self, folder: Path, shape: Callable[[Path], fake_sysfs.FakeSysfs]) -> None:
        self.folder = folder
        self.sysfs = shape(folder / "sys")
        (folder / "dev/shm").mkdir(parents=True)
        self.write_proc("sys/kernel/osrelease", "6.8.0-1024-aws")
        self.write_proc("meminfo", MEMORY)
        self.write_proc("self/status", "Name:\tpython\nCapEff:\t0000000000000000")
        self.write_proc("self/cgroup", "0::/kubepods/pod1")
        self.write_proc("net/if_inet6", "00000000000000000000000000000001 01 80 10 80 lo")
        self.write_proc("sys/net/ipv6/conf/all/disable_ipv6", "0")
        self.write_proc("driver/nvidia/version", OPEN_DRIVER)
        self.sysfs.write("kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
        if (self.sysfs.root / "class/infiniband").exists():
            self.write("dev/infiniband/uverbs0", "")

    def write(self, path: str, text: str) -> Path:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def write_proc(self, path: str, text: str) -> None:
        self.write(f"proc/{path}", f"{text}\n")

    def system(self, **changes: Any) -> System:
        """A machine on which all is well, but for `changes`."""
        topology = read_topology(self.sysfs.root)
        healthy = System(
            settings=Settings(),
            sys_root=self.sysfs.root,
            proc_root=self.folder / "proc",
            dev_root=self.folder / "dev",
            topology=topology,
            libraries=Libraries(FABRIC, UCP),
            packages={"ray": "2.60.0", "numba": "0.68.1", "mpich": "5.0.2"},
            rdma_libraries=frozenset(RDMA_LIBRARIES),
            python=(3, 11, 7),
            affinity=frozenset(topology.cpus),
            memlock_bytes=None,
            shm=ShmSpace(64 * GIB, 60 * GIB),
            environment={},
            port_fault=lambda host, port: "",
        )
        return replace(healthy, **changes)
