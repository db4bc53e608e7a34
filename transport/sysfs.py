"""Reads what Linux tells under /sys about PCI devices, RDMA devices and CPUs.

Every function takes the root of the tree, so that it can be another machine's. A file that is missing, empty or not
readable (containers hide some) yields "unknown": "", None, -1 or an empty tuple. Nothing here raises.

Source: Linux, Documentation/ABI/{stable,testing}/sysfs-{bus-pci,class-infiniband,devices-node,devices-system-cpu}.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SOFTWARE_DRIVERS = frozenset({"rxe", "siw"})
"""RDMA done by the kernel over an ordinary network interface: soft RoCE, soft iWARP."""

_AMAZON = 0x1D0F
_BRIDGE = re.compile(r"pci[0-9a-f]+:[0-9a-f]{2}")
_ADDRESS = re.compile(r"([0-9a-f]+):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")


@dataclass(frozen=True, slots=True)
class PciDevice:
    """`vendor` and `model` are PCI ids, `kind` is class and subclass (0x0302: 3D controller), `numa` -1 if unknown.

    `path` leads from the host bridge through root port and switches to the device itself.
    """

    address: str
    vendor: int
    model: int
    kind: int
    numa: int
    driver: str
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RdmaPort:
    number: int
    state: str
    """ACTIVE, DOWN, INIT, …"""
    link_layer: str
    """InfiniBand, Ethernet, Unspecified."""
    speed_gbps: float


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """`pci` is None for software devices, whatever interface they run over."""

    name: str
    driver: str
    pci: PciDevice | None
    node_guid: str
    ports: tuple[RdmaPort, ...]

    @property
    def is_efa(self) -> bool:
        return self.driver == "efa" or (self.pci is not None and self.pci.vendor == _AMAZON)


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table. `kind` is `IB/RoCE v1` or `RoCE v2`, `netdev` "" on InfiniBand."""

    index: int
    address: str
    kind: str
    netdev: str


def read_text(path: Path) -> str:
    """The file without white space at its ends; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_int(path: Path, default: int) -> int:
    """The number in the file (decimal, or 0x…); `default` if there is none."""
    try:
        return int(read_text(path), 0)
    except ValueError:
        return default


def parse_cpus(text: str) -> tuple[int, ...]:
    """`0-3,8,10-11` as numbers, ascending; () for what is no such list."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        try:
            cpus.update(range(int(first), int(last or first) + 1))
        except ValueError:
            return ()
    return tuple(sorted(cpus))


def pci_order(address: str) -> tuple[int, ...]:
    """Sorts addresses by domain, bus, device and function; what is no address comes last."""
    match = _ADDRESS.fullmatch(address)
    return tuple(int(part, 16) for part in match.groups()) if match else (1 << 62,)


def pci_devices(root: Path) -> tuple[PciDevice, ...]:
    """All PCI devices, by address."""
    folder = root / "bus/pci/devices"
    devices = [read_pci(entry) for entry in _entries(folder)]
    return tuple(sorted(devices, key=lambda device: pci_order(device.address)))


def read_pci(link: Path) -> PciDevice:
    """The device that a symbolic link, such as those of bus/pci/devices, leads to."""
    place = link.resolve()
    parts = place.parts
    start = next((i for i, part in enumerate(parts) if _BRIDGE.fullmatch(part)), len(parts) - 1)
    return PciDevice(
        address=place.name,
        vendor=read_int(place / "vendor", 0),
        model=read_int(place / "device", 0),
        kind=read_int(place / "class", 0) >> 8,
        numa=read_int(place / "numa_node", -1),
        driver=_driver(place),
        path=parts[start:],
    )


def rdma_devices(root: Path) -> tuple[RdmaDevice, ...]:
    """All RDMA devices, by name."""
    return tuple(_rdma_device(entry) for entry in _entries(root / "class/infiniband"))


def gids(root: Path, device: str, port: int) -> tuple[Gid, ...]:
    """The entries of a port's GID table that are in use."""
    folder = root / "class/infiniband" / device / "ports" / str(port)
    found = []
    for entry in _entries(folder / "gids"):
        address = read_text(entry)
        if entry.name.isdigit() and address.strip("0:"):
            kind = read_text(folder / "gid_attrs/types" / entry.name)
            netdev = read_text(folder / "gid_attrs/ndevs" / entry.name)
            found.append(Gid(int(entry.name), address, kind, netdev))
    return tuple(sorted(found, key=lambda gid: gid.index))


def numa_cpus(root: Path) -> dict[int, tuple[int, ...]]:
    """The CPUs of every NUMA node; {} where the kernel knows none."""
    nodes = {}
    for entry in _entries(root / "devices/system/node"):
        if re.fullmatch(r"node\d+", entry.name):
            nodes[int(entry.name[4:])] = parse_cpus(read_text(entry / "cpulist"))
    return dict(sorted(nodes.items()))


def online_cpus(root: Path) -> tuple[int, ...]:
    """() where the kernel does not tell."""
    folder = root / "devices/system/cpu"
    told = parse_cpus(read_text(folder / "online"))
    names = [entry.name for entry in _entries(folder) if re.fullmatch(r"cpu\d+", entry.name)]
    return told or tuple(sorted(int(name[3:]) for name in names))


def siblings(root: Path, cpu: int) -> tuple[int, ...]:
    """The hardware threads of the CPU's core, itself included."""
    told = parse_cpus(read_text(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
    return told if cpu in told else (cpu,)


def _rdma_device(entry: Path) -> RdmaDevice:
    software = _software_driver(entry)
    pci = None
    if not software and _ADDRESS.fullmatch((entry / "device").resolve().name):
        pci = read_pci(entry / "device")
    ports = sorted((_port(port) for port in _entries(entry / "ports")), key=lambda port: port.number)
    driver = software or (pci.driver if pci else _driver(entry / "device"))
    return RdmaDevice(entry.name, driver, pci, read_text(entry / "node_guid"), tuple(ports))


def _software_driver(entry: Path) -> str:
    """Software devices may claim their interface's PCI device as theirs; the description tells them apart."""
    description = read_text(entry / "node_desc").lower()
    if description.startswith("rxe") or entry.name.startswith("rxe"):
        return "rxe"
    return "siw" if description.startswith("software iwarp") or entry.name.startswith("siw") else ""


def _port(folder: Path) -> RdmaPort:
    number = int(folder.name) if folder.name.isdigit() else 0
    state = read_text(folder / "state").rpartition(":")[2].strip()
    speed = re.match(r"[\d.]+", read_text(folder / "rate"))
    return RdmaPort(number, state, read_text(folder / "link_layer"), float(speed.group()) if speed else 0.0)


def _driver(place: Path) -> str:
    link = place / "driver"
    return link.resolve().name if link.is_symlink() else ""


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
