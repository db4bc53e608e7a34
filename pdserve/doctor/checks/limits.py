"""What the system lets a process have: locked memory, shared memory, huge pages, CPU time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from actors.local_ray import OBJECT_STORE_BYTES
from pdserve.doctor.report import Check, fail, ok, warn
from pdserve.doctor.system import System
from transport import sysfs

GIB = 1 << 30
SHM_ENDPOINT_BYTES = 16 << 20
"""What one endpoint of libfabric's shm provider takes of /dev/shm, rounded up."""
CAP_IPC_LOCK = 14
_CPU_MAX, _CFS_QUOTA, _CFS_PERIOD = "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"


def memlock(system: System) -> Check:
    """Registered memory is locked memory."""
    name, limit = "memlock", system.memlock_bytes
    if limit is None:
        return ok(name, "unlimited")
    found = _size(limit)
    if _may_lock(system):
        return ok(name, f"{found}, which does not bind this process (CAP_IPC_LOCK)")
    if not system.has_rdma:
        return ok(name, f"{found}; only RDMA needs more")
    return (fail if limit < GIB else warn)(
        name,
        found,
        "RDMA registers whole page pools: ulimit -l unlimited before the start, '* - memlock unlimited' in "
        "/etc/security/limits.conf, LimitMEMLOCK=infinity for systemd, --ulimit memlock=-1 for docker",
    )


def dev_shm(system: System) -> Check:
    """Ray's object store and the shm provider's endpoints lie there."""
    name, space = "dev-shm", system.shm
    grow = "docker: --shm-size=2g; Kubernetes: an emptyDir of medium Memory at /dev/shm; else mount -o remount,size=2g"
    if space is None:
        return fail(name, "there is no /dev/shm", f"Ray does not start without it. {grow}")
    needed = needed_shm_bytes(system)
    found = f"{_size(space.free_bytes)} free of {_size(space.total_bytes)}"
    if space.free_bytes < needed:
        return fail(name, found, f"these settings need {_size(needed)}. {grow}")
    if space.total_bytes < GIB:
        return warn(name, found, f"enough for these settings ({_size(needed)}), not for many nodes. {grow}")
    return ok(name, f"{found}; these settings need {_size(needed)}")


def needed_shm_bytes(system: System) -> int:
    """Ray's store, and two endpoints for each pair of a prefill and a decode node of this host."""
    deployment, ray = system.settings.deployment, OBJECT_STORE_BYTES
    on_shm = system.settings.transport.provider in ("auto", "shm")
    pairs = deployment.prefill.count * deployment.decode.count
    return ray + (2 * pairs * SHM_ENDPOINT_BYTES if on_shm else 0)


def huge_pages(system: System) -> Check:
    name = "hugepages"
    memory = dict(line.split(":", 1) for line in system.proc("meminfo").splitlines() if ":" in line)
    reserved, size = (memory.get(key, "").strip() for key in ("HugePages_Total", "Hugepagesize"))
    choices = sysfs.read_text(system.sys_root / "kernel/mm/transparent_hugepage/enabled")
    mode = choices.partition("[")[2].partition("]")[0] or "unknown"
    found = f"{reserved or '0'} reserved of {size or 'unknown size'}; transparent: {mode}"
    if system.has_rdma and reserved in ("", "0") and mode not in ("always", "madvise"):
        return warn(
            name,
            found,
            "NICs translate registered memory page by page: echo madvise > "
            "/sys/kernel/mm/transparent_hugepage/enabled, or reserve some (sysctl vm.nr_hugepages=1024)",
        )
    return ok(name, found)


def cpu_quota(system: System) -> Check:
    """A process over its quota is stopped for the rest of the period, and whoever waits for its writes with it."""
    name, cpus = "cpu-quota", len(system.affinity)
    quota = min(_quotas(system), default=None)
    if quota is None:
        return ok(name, f"none; {cpus} CPUs")
    found = f"{quota:g} of {cpus} CPUs"
    if quota < cpus:
        return warn(
            name,
            found,
            "threads that poll are throttled for milliseconds at a time: raise the cgroup's limit (docker --cpus, "
            "Kubernetes limits.cpu), or give whole CPUs (--cpuset-cpus, the static CPU manager)",
        )
    return ok(name, found)


def _quotas(system: System) -> Iterator[float]:
    """CPUs' worth of time that each cgroup above this process allows, of version 1 or 2."""
    mounts = system.sys_root / "fs/cgroup"
    for line in system.proc("self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        for name in [names, *names.split(","), "unified"] if names else ["", "unified"]:
            for folder in _upwards(mounts / name, path):
                yield from _quota(folder)


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    relative = Path(path.lstrip("/"))
    for part in (relative, *relative.parents):
        yield mount / part


def _quota(folder: Path) -> Iterator[float]:
    limit, _, period = sysfs.read_text(folder / _CPU_MAX).partition(" ")
    if limit.isdigit() and period.isdigit():
        yield int(limit) / int(period)
    quota_us = sysfs.read_int(folder / _CFS_QUOTA, -1)
    if quota_us > 0:
        yield quota_us / max(sysfs.read_int(folder / _CFS_PERIOD, 100_000), 1)


def _may_lock(system: System) -> bool:
    lines = (line.partition(":") for line in system.proc("self/status").splitlines())
    text = next((value.strip() for key, _, value in lines if key == "CapEff"), "0")
    return bool(int(text, 16) >> CAP_IPC_LOCK & 1)


def _size(count_bytes: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20)):
        if count_bytes >= size:
            return f"{count_bytes / size:.4g} {unit}"
    return f"{count_bytes / 1024:.4g} KiB"
