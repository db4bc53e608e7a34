"""Every check of `pdserve doctor`, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pdserve.doctor.checks import devices, files, libraries, limits, network, placement, software
from pdserve.doctor.report import Check
from pdserve.doctor.system import System

CHECKS: tuple[Callable[[System], Check | Iterable[Check]], ...] = (
    software.python,
    software.kernel,
    software.ray,
    software.numba,
    libraries.libfabric,
    libraries.providers,
    libraries.libucp,
    devices.rdma_devices,
    devices.rdma_ports,
    devices.rdma_libraries,
    placement.devices,
    devices.peer_memory,
    limits.memlock,
    limits.dev_shm,
    limits.huge_pages,
    limits.cpu_quota,
    network.ipv6,
    network.congestion_control,
    network.ports,
    files.leftovers,
)


def run_checks(system: System) -> list[Check]:
    """The findings of every check; a name appears once."""
    findings: list[Check] = []
    for check in CHECKS:
        found = check(system)
        findings.extend([found] if isinstance(found, Check) else found)
    return findings
