"""Which NICs and which CPUs serve which device, from what Linux tells under /sys. Pure but for the reading.

`read_topology` finds GPUs, NICs and CPUs; `place` decides:

- **Candidates** are the NICs that are up, of one kind (link layer; hardware apart from software): the kind that has
  the most bandwidth in this node, since NICs of different kinds do not reach each other. Of these, a NIC of less than
  half the fastest one's speed (the host's own Ethernet port) is left out: blocks are dealt evenly, so that it would
  hold back the rest. Where NICs are named by the settings, those are the candidates.
- **Distance** is how far up in the PCI tree the path from the device meets the NIC's: at a switch (the lowest first),
  at the root port, at the host bridge; beyond it, on the same NUMA node; then the rest. A device takes all NICs at its
  smallest distance.
- **Devices that are equally near to the same NICs** divide these evenly, in PCI order, if each gets one at least, and
  share all of them otherwise.
- **CPUs** are of the device's NUMA node and of the process's affinity mask: a physical core each for the worker and
  the watcher of every device as long as cores last, then their other hardware threads, then CPUs taken twice. CPU 0
  comes last in each round: interrupts and the kernel's own work gather there.

Every process of a node gets the same answer from the same mask, so that they need not agree on it by messages.

Tested on synthetic trees of the shapes that it is made for; it has not run on such a machine yet.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from transport import sysfs
from transport.sysfs import RdmaDevice

GPU_KINDS = {0x10DE: frozenset({0x0300, 0x0302})}
"""PCI class and subclass by vendor. NVIDIA's display and 3D controllers only: the engine drives no others, a BMC's
display is none, and NVIDIA's switches (0x0680) and audio functions (0x0403) are no GPUs."""

SLOW_SHARE = 0.5
"""A NIC below this share of the fastest one's speed carries no blocks."""

_LAST = 1 << 30


class Nearness(IntEnum):
    """Where the ways from a device and from a NIC meet."""

    SWITCH = 0
    ROOT_PORT = 1
    HOST_BRIDGE = 2
    NUMA = 3
    OTHER = 4


@dataclass(frozen=True, slots=True)
class Nic:
    """An RDMA device. `rail` is unique in the node: the position in PCI order, also of NICs that are down."""

    name: str
    pci: str | None
    numa: int
    speed_gbps: float
    link_layer: str
    """`InfiniBand`, `Ethernet`, `EFA`, or what the kernel says."""
    driver: str
    up: bool
    rail: int
    path: tuple[str, ...] = ()
    """From the host bridge to the device itself; () for software devices."""

    @property
    def is_software(self) -> bool:
        return self.driver in sysfs.SOFTWARE_DRIVERS


@dataclass(frozen=True, slots=True)
class Gpu:
    """`index` is the position in PCI order, which is CUDA's only with CUDA_DEVICE_ORDER=PCI_BUS_ID: go by `pci`."""

    index: int
    pci: str
    numa: int
    path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Topology:
    """What a node has. `cores` are the online CPUs, one tuple of hardware threads per physical core."""

    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    numa_cpus: Mapping[int, tuple[int, ...]]
    cores: tuple[tuple[int, ...], ...]

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for core in self.cores for cpu in core))


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """The NICs of a device in rail order, and the CPUs of its threads. `device` None: the node has no GPU."""

    device: Gpu | None
    nics: tuple[Nic, ...]
    worker_cpu: int
    watcher_cpu: int


def read_topology(root: Path = Path("/sys")) -> Topology:
    """Raises nothing: what cannot be read is unknown."""
    found = [device for device in sysfs.pci_devices(root) if device.kind in GPU_KINDS.get(device.vendor, ())]
    gpus = tuple(Gpu(index, device.address, device.numa, device.path) for index, device in enumerate(found))
    devices = sorted(sysfs.rdma_devices(root), key=_rail_order)
    nics = tuple(_nic(device, rail) for rail, device in enumerate(devices))
    cpus = sysfs.online_cpus(root) or tuple(range(os.cpu_count() or 1))
    cores = {sysfs.siblings(root, cpu) for cpu in cpus}
    online = {tuple(cpu for cpu in core if cpu in cpus) for core in cores}
    return Topology(gpus, nics, sysfs.numa_cpus(root), tuple(sorted(online)))


def place(
    topology: Topology, affinity: Collection[int] | None = None, nic_names: Sequence[str] | None = None
) -> tuple[DevicePlacement, ...]:
    """One placement per GPU, by index; one with device None if there is no GPU.

    `affinity`: CPUs that the process may run on; `nic_names`: the NICs to use, also if down. Raises ValueError for a
    name that the node has not.
    """
    candidates = fabric_nics(topology) if nic_names is None else _named(topology, nic_names)
    desk = _CpuDesk(topology, affinity)
    if not topology.gpus:
        nodes = [nic.numa for nic in candidates]
        return (DevicePlacement(None, candidates, desk.take(nodes), desk.take(nodes)),)
    shares = _deal(topology.gpus, candidates)
    return tuple(
        DevicePlacement(gpu, shares[gpu], desk.take([gpu.numa]), desk.take([gpu.numa])) for gpu in topology.gpus
    )


def distance(gpu: Gpu, nic: Nic) -> tuple[Nearness, int, int]:
    """Smaller is nearer: (where the ways meet, bridges up from the GPU to there, 1 if the NUMA nodes differ)."""
    common = 0
    for mine, its in zip(gpu.path, nic.path, strict=False):
        if mine != its:
            break
        common += 1
    known = gpu.numa >= 0 and nic.numa >= 0
    elsewhere = int(known and gpu.numa != nic.numa)
    if common:
        meeting = {1: Nearness.HOST_BRIDGE, 2: Nearness.ROOT_PORT}.get(common, Nearness.SWITCH)
        return meeting, len(gpu.path) - common, elsewhere
    return (Nearness.NUMA if known and not elsewhere else Nearness.OTHER), 0, elsewhere


def fabric_nics(topology: Topology) -> tuple[Nic, ...]:
    """The NICs that may carry blocks (see the module's docstring), in rail order."""
    kinds: dict[tuple[str, bool], list[Nic]] = {}
    for nic in topology.nics:
        if nic.up:
            kinds.setdefault((nic.link_layer, nic.is_software), []).append(nic)
    if not kinds:
        return ()
    best = max(kinds.items(), key=lambda item: (not item[0][1], sum(nic.speed_gbps for nic in item[1])))[1]
    fastest = max(nic.speed_gbps for nic in best)
    return tuple(nic for nic in best if nic.speed_gbps >= SLOW_SHARE * fastest)


def _named(topology: Topology, names: Sequence[str]) -> tuple[Nic, ...]:
    unknown = sorted(set(names) - {nic.name for nic in topology.nics})
    if unknown:
        there = ", ".join(nic.name for nic in topology.nics) or "none"
        raise ValueError(f"no NIC {', '.join(unknown)} in this node; it has: {there}")
    return tuple(nic for nic in topology.nics if nic.name in names)


def _nic(device: RdmaDevice, rail: int) -> Nic:
    """Of several ports the fastest one that is up counts."""
    ports = sorted(device.ports, key=lambda port: (port.state == "ACTIVE", port.speed_gbps))
    port = ports[-1] if ports else None
    return Nic(
        name=device.name,
        pci=device.pci.address if device.pci else None,
        numa=device.pci.numa if device.pci else -1,
        speed_gbps=port.speed_gbps if port else 0.0,
        link_layer="EFA" if device.is_efa else (port.link_layer if port else ""),
        driver=device.driver,
        up=port is not None and port.state == "ACTIVE",
        rail=rail,
        path=device.pci.path if device.pci else (),
    )


def _rail_order(device: RdmaDevice) -> tuple[tuple[int, ...], str]:
    return sysfs.pci_order(device.pci.address if device.pci else ""), device.name


def _deal(gpus: Iterable[Gpu], nics: tuple[Nic, ...]) -> dict[Gpu, tuple[Nic, ...]]:
    groups: dict[tuple[Nic, ...], list[Gpu]] = {}
    for gpu in gpus:
        nearest = min((distance(gpu, nic) for nic in nics), default=None)
        groups.setdefault(tuple(nic for nic in nics if distance(gpu, nic) == nearest), []).append(gpu)
    shares = {}
    for near, group in groups.items():
        for i, gpu in enumerate(group):
            first, end = i * len(near) // len(group), (i + 1) * len(near) // len(group)
            shares[gpu] = near[first:end] if len(near) >= len(group) else near
    return shares


class _CpuDesk:
    """Hands CPUs out, each physical core once before any is taken again."""

    def __init__(self, topology: Topology, affinity: Collection[int] | None) -> None:
        allowed = set(topology.cpus)
        # A mask without any online CPU is another machine's; then it restricts nothing.
        allowed = allowed & set(allowed if affinity is None else affinity) or allowed
        cores = [[cpu for cpu in core if cpu in allowed] for core in topology.cores]
        ranked = [
            (thread, _LAST if cpu == 0 else position, cpu)
            for position, core in enumerate(cores)
            for thread, cpu in enumerate(core)
        ]
        self._order = [cpu for *_, cpu in sorted(ranked)]
        self._nodes = topology.numa_cpus
        self._taken: Counter[int] = Counter()

    def take(self, nodes: Iterable[int]) -> int:
        """A CPU of these NUMA nodes; of any node if none of them is known."""
        near = {cpu for node in nodes for cpu in self._nodes.get(node, ())}
        pool = [cpu for cpu in self._order if cpu in near] or self._order
        cpu = min(pool, key=lambda candidate: self._taken[candidate])
        self._taken[cpu] += 1
        return cpu
