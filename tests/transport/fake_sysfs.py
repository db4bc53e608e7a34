"""Builds trees like Linux's /sys, with the symbolic links of the real one, and the machines the tests ask about."""

from __future__ import annotations

import os
from pathlib import Path

NVIDIA, MELLANOX, AMAZON, ASPEED = 0x10DE, 0x15B3, 0x1D0F, 0x1A03
GPU_3D, GPU_VGA, NIC_CLASS, INFINIBAND_CLASS, EFA_CLASS = 0x030200, 0x030000, 0x020000, 0x020700, 0x020000


class FakeSysfs:
    """A tree under `root`. Methods add what a kernel would show; whatever is not added is not there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def link(self, path: str, target: Path) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(target, place.parent))

    def pci(
        self, path: str, vendor: int, kind: int, numa: int | None = None, driver: str = "", model: int = 0x1000
    ) -> Path:
        """A PCI device at `path`, such as pci0000:50/0000:50:01.0/0000:53:00.0; bridges on the way are made, too."""
        folder = self.root / "devices" / path
        for place in (*reversed(folder.parents), folder):
            if place.name.startswith("0000:") and not (place / "vendor").exists():
                leaf = place == folder
                relative = str(place.relative_to(self.root))
                self.write(f"{relative}/vendor", f"{vendor if leaf else 0x8086:#06x}")
                self.write(f"{relative}/device", f"{model if leaf else 0x1000:#06x}")
                self.write(f"{relative}/class", f"{kind if leaf else 0x060400:#08x}")
                self.link(f"bus/pci/devices/{place.name}", place)
        relative = str(folder.relative_to(self.root))
        if numa is not None:
            self.write(f"{relative}/numa_node", numa)
        if driver:
            (self.root / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
            self.link(f"{relative}/driver", self.root / "bus/pci/drivers" / driver)
        return folder

    def gpu(self, path: str, numa: int | None = None) -> None:
        self.pci(path, NVIDIA, GPU_3D, numa, "nvidia")

    def rdma(
        self, name: str, device: Path | None, layer: str = "InfiniBand", gbps: float = 400, state: str = "4: ACTIVE"
    ) -> None:
        """An RDMA device of one port; `device` is its PCI device's folder, None for one without."""
        above = device or self.root / "devices/virtual"
        folder = above / "infiniband" / name
        relative = str(folder.relative_to(self.root))
        self.write(f"{relative}/node_guid", "0c42:a103:0065:1234")
        self.write(f"{relative}/ports/1/state", state)
        self.write(f"{relative}/ports/1/link_layer", layer)
        self.write(f"{relative}/ports/1/rate", f"{gbps:g} Gb/sec (4X NDR)")
        if device is not None:
            self.link(f"{relative}/device", device)
        self.link(f"class/infiniband/{name}", folder)

    def nic(self, name: str, path: str, numa: int | None = None, **port: object) -> None:
        """A ConnectX."""
        kind = NIC_CLASS if port.get("layer") == "Ethernet" else INFINIBAND_CLASS
        self.rdma(name, self.pci(path, MELLANOX, kind, numa, "mlx5_core"), **port)  # type: ignore[arg-type]

    def efa(self, name: str, path: str, numa: int | None = None, gbps: float = 100) -> None:
        self.rdma(name, self.pci(path, AMAZON, EFA_CLASS, numa, "efa"), layer="Unspecified", gbps=gbps)

    def rxe(self, name: str, netdev: str, device: Path | None = None) -> None:
        self.rdma(name, device, layer="Ethernet", gbps=2.5)
        self.write(f"class/infiniband/{name}/node_desc", "rxe")
        self.write(f"class/infiniband/{name}/parent", netdev)

    def gid(self, name: str, index: int, address: str, kind: str = "", netdev: str = "") -> None:
        port = f"class/infiniband/{name}/ports/1"
        self.write(f"{port}/gids/{index}", address)
        if kind:
            self.write(f"{port}/gid_attrs/types/{index}", kind)
        if netdev:
            self.write(f"{port}/gid_attrs/ndevs/{index}", netdev)

    def roce(self, name: str, netdev: str, mtu: int = 9000) -> None:
        """The usual GIDs of a device over an interface with an IPv4 address."""
        self.write(f"class/net/{netdev}/mtu", mtu)
        for index, kind in ((0, "IB/RoCE v1"), (1, "RoCE v2")):
            self.gid(name, index, "fe80:0000:0000:0000:0e42:a1ff:fe65:1234", kind, netdev)
            self.gid(name, index + 2, "0000:0000:0000:0000:0000:ffff:0a00:0001", kind, netdev)

    def cpus(self, nodes: int, cores_per_node: int, threads: int = 2, numa: bool = True) -> None:
        """As Linux numbers them: all cores of all nodes first, then their second threads."""
        cores = nodes * cores_per_node
        self.write("devices/system/cpu/online", f"0-{cores * threads - 1}")
        for cpu in range(cores * threads):
            same = ",".join(str(cpu % cores + cores * thread) for thread in range(threads))
            self.write(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", same)
        for node in range(nodes if numa else 0):
            first = node * cores_per_node
            ranges = [f"{first + t * cores}-{first + t * cores + cores_per_node - 1}" for t in range(threads)]
            self.write(f"devices/system/node/node{node}/cpulist", ",".join(ranges))


def p5(root: Path) -> FakeSysfs:
    """p5.48xlarge: 8 GPUs, each behind a switch with 4 EFA NICs of 100 Gbit/s; 2 × 48 cores."""
    return _efa_machine(root, nics_per_gpu=4, gbps=100)


def p5en(root: Path) -> FakeSysfs:
    """p5en.48xlarge: 8 GPUs, each behind a switch with 2 EFA NICs of 200 Gbit/s; 2 × 48 cores."""
    return _efa_machine(root, nics_per_gpu=2, gbps=200)


def dgx_h100(root: Path) -> FakeSysfs:
    """DGX H100, or an HGX H200 board: 8 GPUs, each behind a switch with one ConnectX-7; 2 × 56 cores.

    Two more ConnectX-7 (storage, Ethernet) and a BMC's display hang on root ports of their own; NVSwitches, too.
    """
    machine = FakeSysfs(root)
    machine.cpus(nodes=2, cores_per_node=56)
    names = ("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11")
    for i, bus in enumerate((0x15, 0x37, 0x48, 0x59, 0x87, 0xB7, 0xC7, 0xD7)):
        switch = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        machine.nic(names[i], f"{switch}/0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0", i // 4)
        machine.gpu(f"{switch}/0000:{bus + 2:02x}:01.0/0000:{bus + 6:02x}:00.0", i // 4)
    machine.nic("mlx5_1", "pci0000:26/0000:26:01.0/0000:29:00.0", 0, layer="Ethernet")
    machine.nic("mlx5_7", "pci0000:a6/0000:a6:01.0/0000:a9:00.0", 1, layer="Ethernet")
    machine.roce("mlx5_1", "eth0")
    machine.roce("mlx5_7", "eth1")
    machine.pci("pci0000:00/0000:00:1c.0/0000:02:00.0", ASPEED, GPU_VGA, 0, "ast")
    machine.pci("pci0000:04/0000:04:01.0/0000:05:00.0", NVIDIA, 0x068000, 0, "nvidia-nvswitch")
    return machine


def pcie_box(root: Path) -> FakeSysfs:
    """Two sockets of 16 cores; on each, two GPUs and one ConnectX (RoCE) on root ports of one host bridge."""
    machine = FakeSysfs(root)
    machine.cpus(nodes=2, cores_per_node=16)
    for socket, (bridge, gpus, nic) in enumerate(((0x00, (0x01, 0x02), 0x41), (0x80, (0x81, 0x82), 0xC1))):
        host = f"pci0000:{bridge:02x}"
        for port, bus in enumerate(gpus):
            machine.gpu(f"{host}/0000:{bridge:02x}:0{1 + port}.0/0000:{bus:02x}:00.0", socket)
        path = f"{host}/0000:{bridge:02x}:03.0/0000:{nic:02x}:00.0"
        machine.nic(f"mlx5_{socket}", path, socket, layer="Ethernet", gbps=100)
        machine.roce(f"mlx5_{socket}", f"eth{socket}")
    return machine


def plain_server(root: Path) -> FakeSysfs:
    """Four cores without second threads; an ordinary network card and nothing else."""
    machine = FakeSysfs(root)
    machine.cpus(nodes=1, cores_per_node=4, threads=1)
    machine.pci("pci0000:00/0000:00:03.0", 0x1AF4, NIC_CLASS, driver="virtio-pci")
    return machine


def soft_roce(root: Path) -> FakeSysfs:
    """Two soft RoCE devices over dummy interfaces."""
    machine = plain_server(root)
    for i in range(2):
        machine.rxe(f"rxe{i}", f"dm{i}")
    return machine


def _efa_machine(root: Path, nics_per_gpu: int, gbps: float) -> FakeSysfs:
    machine = FakeSysfs(root)
    machine.cpus(nodes=2, cores_per_node=48)
    for i, bus in enumerate((0x4F, 0x60, 0x71, 0x82, 0x93, 0xA4, 0xB5, 0xC6)):
        root_bus = bus - 11
        switch = f"pci0000:{root_bus:02x}/0000:{root_bus:02x}:01.0/0000:{bus - 10:02x}:00.0"
        for j in range(nics_per_gpu):
            port = f"{switch}/0000:{bus - 9:02x}:{j:02x}.0"
            machine.efa(f"rdmap{bus + j}s0", f"{port}/0000:{bus + j:02x}:00.0", i // 4, gbps)
        machine.gpu(f"{switch}/0000:{bus - 9:02x}:08.0/0000:{bus + 4:02x}:00.0", i // 4)
    return machine
