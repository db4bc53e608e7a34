"""RDMA devices, their ports, and whether NICs reach GPU memory.

What is said about RDMA NICs and GPUs was tested on made-up machines; it has not run on such hardware yet.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.doctor.report import Check, fail, ok, warn
from pdserve.doctor.system import RDMA_LIBRARIES, System
from transport import sysfs
from transport.sysfs import Gid, RdmaDevice, RdmaPort
from transport.topology import Nic

DMABUF_KERNEL = (5, 12)
FULL_MTU_BYTES = 4200
"""What an interface needs so that RDMA packets carry 4096 bytes."""
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")
_MELLANOX, _AMAZON = 0x15B3, 0x1D0F
_NETWORK = 0x02
_EFA_MODELS = range(0xEFA0, 0xEFB0)

INSTALL = "apt install librdmacm1 libibverbs1 ibverbs-providers, or the NIC vendor's rdma-core"
WITHOUT = "Until then pages go by shared memory within a host and by TCP between hosts"
GPUS_WITHOUT = ", which nodes with GPUs refuse unless the settings allow it by name"


def rdma_devices(system: System) -> Check:
    """Which there are, and whether this process may open them."""
    name, nics = "rdma-devices", system.topology.nics
    if not nics:
        without = WITHOUT + (GPUS_WITHOUT if system.topology.gpus else "")
        return warn(name, "none", f"{_missing(system)}\n{without}")
    found = ", ".join(_described(nic) for nic in nics)
    if not any(nic.up for nic in nics):
        return fail(name, f"{found}: all down", "connect the cable, or bring the interface up (ip link set DEV up)")
    if not list(system.dev_root.glob("infiniband/uverbs*")):
        return fail(
            name,
            f"{found}, but no /dev/infiniband/uverbs*",
            "modprobe ib_uverbs; in a container, pass the devices on: --device=/dev/infiniband, or the device plugin "
            "of the cluster",
        )
    if all(nic.is_software for nic in nics):
        advice = (
            "software RDMA is for tests: it is no faster than TCP. For more, this machine needs a ConnectX or EFA NIC"
        )
        return warn(name, found, advice)
    return ok(name, found)


def rdma_ports(system: System) -> Iterator[Check]:
    """Link state of every port; on Ethernet, GID table and MTU, too."""
    for device in sysfs.rdma_devices(system.sys_root):
        for port in device.ports:
            yield _port(system, device, port)


def rdma_libraries(system: System) -> Check:
    """libfabric drives RDMA NICs through these."""
    absent = [library for library in RDMA_LIBRARIES if library not in system.rdma_libraries]
    found = ", ".join(library for library in RDMA_LIBRARIES if library not in absent) or "none"
    if absent and system.has_rdma:
        return fail("rdma-libraries", found, f"{' and '.join(absent)} do not load: {INSTALL}")
    return ok("rdma-libraries", found)


def peer_memory(system: System) -> Check:
    """Whether a NIC can reach GPU memory: by dmabuf, or by a module of peer memory."""
    name = "peer-memory"
    if not system.topology.gpus:
        return ok(name, "no GPU here")
    modules = {line.split()[0] for line in system.proc("modules").splitlines() if line}
    present = [module for module in PEER_MODULES if module in modules]
    release = ".".join(map(str, system.kernel))
    if system.kernel >= DMABUF_KERNEL and "Open Kernel Module" in system.proc("driver/nvidia/version"):
        return ok(name, ", ".join([f"dmabuf (Linux {release}, NVIDIA's open kernel modules)", *present]))
    if present:
        return ok(name, ", ".join(present))
    return (fail if system.has_rdma else warn)(
        name,
        f"neither dmabuf (Linux {release}) nor {PEER_MODULES[0]}",
        f"NICs cannot reach GPU memory: modprobe {PEER_MODULES[0]}, or use Linux 5.12 or newer with NVIDIA's open "
        "kernel modules (515 or newer)",
    )


def _described(nic: Nic) -> str:
    state = "" if nic.up else ", down"
    return f"{nic.name} ({nic.driver or 'unknown driver'}, {nic.link_layer}, {nic.speed_gbps:g} Gb/s{state})"


def _missing(system: System) -> str:
    """What stands between this machine and RDMA, one line each."""
    lines = list(_driverless(system)) or [
        "no NIC that can do RDMA is on the PCI bus: fit one (ConnectX; on Amazon an instance type with EFA, attached), "
        "or in a virtual machine pass one through"
    ]
    lines.append("/sys/class/infiniband is empty: load the kernel's driver (mlx5_ib; efa)")
    absent = [library for library in RDMA_LIBRARIES if library not in system.rdma_libraries]
    if absent:
        lines.append(f"{' and '.join(absent)} are not installed: {INSTALL}")
    return "Missing for RDMA:\n" + "\n".join(f"- {line}" for line in lines)


def _driverless(system: System) -> Iterator[str]:
    """NICs that could do RDMA, if their driver were there."""
    for device in sysfs.pci_devices(system.sys_root):
        if device.vendor == _MELLANOX and device.kind >> 8 == _NETWORK:
            yield f"{device.address} is a ConnectX without its RDMA driver: modprobe mlx5_ib"
        elif device.vendor == _AMAZON and device.model in _EFA_MODELS:
            yield f"{device.address} is an EFA without its driver: aws-efa-installer brings it"


def _port(system: System, device: RdmaDevice, port: RdmaPort) -> Check:
    name = f"rdma-port {device.name}/{port.number}"
    layer = "EFA" if device.is_efa else port.link_layer
    found = f"{port.state or 'unknown state'}, {layer}, {port.speed_gbps:g} Gb/s"
    if port.state != "ACTIVE":
        hint = (
            "a subnet manager has to run" if port.state == "INIT" else "check cable and switch, or ip link set DEV up"
        )
        return warn(name, found, f"this port carries nothing: {hint}")
    if layer != "Ethernet":
        return ok(name, found)
    return _roce(system, name, found, sysfs.gids(system.sys_root, device.name, port.number))


def _roce(system: System, name: str, found: str, gids: tuple[Gid, ...]) -> Check:
    usable = [gid for gid in gids if gid.kind == "RoCE v2"]
    if not usable:
        return warn(
            name,
            f"{found}, no RoCE v2 GID among {len(gids)}",
            "give the interface an IP address; the kernel then makes a RoCE v2 GID of it (cat "
            "/sys/class/infiniband/*/ports/*/gid_attrs/types/*)",
        )
    gid = min(usable, key=lambda gid: (gid.address.startswith("fe80"), ":ffff:" not in gid.address, gid.index))
    found += f", RoCE v2 GID {gid.index} ({gid.address} on {gid.netdev or 'unknown interface'})"
    if gid.address.startswith("fe80"):
        return warn(name, found, "a link-local GID does not pass routers: give the interface an IP address")
    mtu = sysfs.read_int(system.sys_root / "class/net" / gid.netdev / "mtu", 0) if gid.netdev else 0
    if 0 < mtu < FULL_MTU_BYTES:
        return warn(
            name,
            f"{found}, MTU {mtu}",
            f"packets are smaller than the NIC's 4096 bytes: ip link set {gid.netdev} mtu 9000, on the switches too",
        )
    return ok(name, f"{found}, MTU {mtu or 'unknown'}")
