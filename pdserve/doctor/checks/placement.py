"""Which NICs and CPUs each device would get."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.doctor.report import Check, ok, warn
from pdserve.doctor.system import System
from transport.topology import DevicePlacement, Gpu, Nearness, Nic, distance, place

_WORDS = {
    Nearness.SWITCH: "same switch",
    Nearness.ROOT_PORT: "same root port",
    Nearness.HOST_BRIDGE: "same host bridge",
    Nearness.NUMA: "same NUMA node",
    Nearness.OTHER: "across the machine",
}


def devices(system: System) -> Iterator[Check]:
    """One line per GPU; one for the CPUs where there is none."""
    for placement in place(system.topology, system.affinity):
        device = placement.device
        name = f"device gpu{device.index}" if device else "device cpu"
        yield _placement(name, placement, system)


def _placement(name: str, placement: DevicePlacement, system: System) -> Check:
    gpu = placement.device
    place_text = f"{gpu.pci}, {_numa(gpu)}" if gpu else "no GPU"
    found = (
        f"{place_text}: NICs {_nics(gpu, placement.nics)}; "
        f"worker on CPU {placement.worker_cpu}, watcher on CPU {placement.watcher_cpu}"
    )
    if gpu and system.has_rdma and not placement.nics:
        return warn(name, found, "no NIC of this node is up: this GPU's pages would not go by RDMA")
    if gpu and placement.nics and distance(gpu, placement.nics[0])[0] is Nearness.OTHER:
        return warn(
            name,
            found,
            "its nearest NIC is behind another socket, or NUMA nodes are unknown (numa_node -1): check the BIOS "
            "(NUMA enabled) or the virtual machine's PCI topology",
        )
    if placement.worker_cpu == placement.watcher_cpu:
        return warn(
            name,
            found,
            f"one CPU for both threads: {len(system.affinity)} in this process's affinity mask are too few; start it "
            "with more (taskset, cpuset, Kubernetes requests)",
        )
    return ok(name, found)


def _numa(gpu: Gpu) -> str:
    return f"NUMA node {gpu.numa}" if gpu.numa >= 0 else "NUMA node unknown"


def _nics(gpu: Gpu | None, nics: tuple[Nic, ...]) -> str:
    if not nics:
        return "none"
    names = ", ".join(f"{nic.name} (rail {nic.rail}, {nic.speed_gbps:g} Gb/s)" for nic in nics)
    return f"{names}, {_WORDS[distance(gpu, nics[0])[0]]}" if gpu else names
