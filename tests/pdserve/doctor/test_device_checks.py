"""RDMA devices, ports, GPU memory and the placement of threads, on made-up machines."""

from __future__ import annotations

import pytest

from pdserve.doctor.checks import devices, placement
from pdserve.doctor.report import Status
from tests.pdserve.doctor.made_up import Machine
from tests.transport import fake_sysfs


def ports(machine: Machine) -> dict[str, tuple[str, str]]:
    return {c.name: (str(c.status), c.found + c.advice) for c in devices.rdma_ports(machine.system())}


def test_devices_are_named_with_driver_link_layer_and_speed(box):
    check = devices.rdma_devices(box.system())
    assert check.status is Status.OK
    assert check.found == "mlx5_0 (mlx5_core, Ethernet, 100 Gb/s), mlx5_1 (mlx5_core, Ethernet, 100 Gb/s)"


def test_without_rdma_everything_that_is_missing_is_named(plain):
    check = devices.rdma_devices(plain.system(rdma_libraries=frozenset()))
    assert (check.status, check.found) == (Status.WARN, "none")
    for part in ("no NIC that can do RDMA", "mlx5_ib; efa", "libibverbs.so.1 and librdmacm.so.1", "apt install"):
        assert part in check.advice
    assert "libibverbs" not in devices.rdma_devices(plain.system()).advice


@pytest.mark.parametrize(
    ("vendor", "model", "advice"),
    [
        (fake_sysfs.MELLANOX, 0x1021, "0000:41:00.0 is a ConnectX without its RDMA driver: modprobe mlx5_ib"),
        (fake_sysfs.AMAZON, 0xEFA2, "0000:41:00.0 is an EFA without its driver: aws-efa-installer brings it"),
        (fake_sysfs.AMAZON, 0xEC20, "no NIC that can do RDMA is on the PCI bus"),  # ENA, the ordinary one
    ],
)
def test_a_nic_without_its_driver_is_named(plain, vendor, model, advice):
    plain.sysfs.pci("pci0000:40/0000:40:01.0/0000:41:00.0", vendor, fake_sysfs.NIC_CLASS, model=model)
    assert advice in devices.rdma_devices(plain.system()).advice


def test_gpus_without_rdma_are_told_that_tcp_is_refused(plain):
    assert "refuse" not in devices.rdma_devices(plain.system()).advice
    plain.sysfs.gpu("pci0000:20/0000:20:01.0/0000:21:00.0", 0)
    assert "nodes with GPUs refuse" in devices.rdma_devices(plain.system()).advice


def test_devices_that_are_all_down_fail(box):
    for name in ("mlx5_0", "mlx5_1"):
        box.sysfs.write(f"class/infiniband/{name}/ports/1/state", "1: DOWN")
    check = devices.rdma_devices(box.system())
    assert check.status is Status.FAIL and check.found.endswith("down): all down")


def test_a_container_without_the_device_files_fails(box):
    (box.folder / "dev/infiniband/uverbs0").unlink()
    check = devices.rdma_devices(box.system())
    assert check.status is Status.FAIL and "--device=/dev/infiniband" in check.advice


def test_soft_roce_is_for_tests(machine):
    check = devices.rdma_devices(machine(fake_sysfs.soft_roce).system())
    assert check.status is Status.WARN and "no faster than TCP" in check.advice


def test_missing_libraries_fail_where_there_is_a_nic(box, plain):
    system = box.system(rdma_libraries=frozenset({"libibverbs.so.1"}))
    check = devices.rdma_libraries(system)
    assert (check.status, check.found) == (Status.FAIL, "libibverbs.so.1") and "librdmacm.so.1" in check.advice
    assert devices.rdma_libraries(plain.system(rdma_libraries=frozenset())).status is Status.OK


def test_ports_of_infiniband_and_efa_need_no_gid(machine, tmp_path):
    found = ports(machine(fake_sysfs.p5))
    assert len(found) == 32 and found["rdma-port rdmap79s0/1"] == ("ok", "ACTIVE, EFA, 100 Gb/s")


def test_roce_ports_tell_gid_and_mtu(box):
    assert ports(box)["rdma-port mlx5_0/1"] == (
        "ok",
        "ACTIVE, Ethernet, 100 Gb/s, RoCE v2 GID 3 (0000:0000:0000:0000:0000:ffff:0a00:0001 on eth0), MTU 9000",
    )


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("class/infiniband/mlx5_0/ports/1/state", "1: DOWN", "this port carries nothing: check cable"),
        ("class/infiniband/mlx5_0/ports/1/state", "2: INIT", "a subnet manager has to run"),
        ("class/net/eth0/mtu", "1500", "ip link set eth0 mtu 9000"),
        ("class/infiniband/mlx5_0/ports/1/gid_attrs/types/3", "IB/RoCE v1", "a link-local GID does not pass routers"),
    ],
)
def test_what_is_wrong_with_a_port(box, file, text, told):
    box.sysfs.write(file, text)
    status, words = ports(box)["rdma-port mlx5_0/1"]
    assert status == "warn" and told in words
    assert ports(box)["rdma-port mlx5_1/1"][0] == "ok"


def test_roce_without_a_v2_gid(box):
    for index in (1, 3):
        box.sysfs.write(f"class/infiniband/mlx5_0/ports/1/gid_attrs/types/{index}", "IB/RoCE v1")
    status, words = ports(box)["rdma-port mlx5_0/1"]
    assert status == "warn" and "no RoCE v2 GID among 4" in words


def test_peer_memory(box, plain):
    assert devices.peer_memory(box.system()).found.startswith("dmabuf (Linux 6.8")
    box.write_proc("driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.1")
    assert devices.peer_memory(box.system()).status is Status.FAIL
    box.write_proc("modules", "nvidia 1 0 - Live\nnvidia_peermem 16384 0 - Live 0x0")
    assert devices.peer_memory(box.system()).found == "nvidia_peermem"
    assert devices.peer_memory(plain.system()).found == "no GPU here"


def test_dmabuf_needs_a_kernel_that_has_it(box):
    box.write_proc("sys/kernel/osrelease", "5.10.0-28-cloud")
    check = devices.peer_memory(box.system())
    assert check.status is Status.FAIL and "neither dmabuf (Linux 5.10)" in check.found


def test_every_gpu_gets_a_line_with_nics_and_cpus(box):
    checks = list(placement.devices(box.system()))
    assert [check.name for check in checks] == ["device gpu0", "device gpu1", "device gpu2", "device gpu3"]
    assert checks[2].found == (
        "0000:81:00.0, NUMA node 1: NICs mlx5_1 (rail 1, 100 Gb/s), same host bridge; "
        "worker on CPU 16, watcher on CPU 17"
    )


def test_without_gpu_the_cpus_get_a_line(plain):
    (check,) = placement.devices(plain.system())
    assert (check.status, check.name) == (Status.OK, "device cpu")


@pytest.mark.parametrize("down", [("mlx5_1",), ("mlx5_0", "mlx5_1")])
def test_gpus_without_a_near_nic_are_warned_of(box, down):
    for name in down:
        box.sysfs.write(f"class/infiniband/{name}/ports/1/state", "1: DOWN")
    statuses = [check.status for check in placement.devices(box.system())]
    assert statuses == ([Status.WARN] * 4 if len(down) == 2 else [Status.OK] * 2 + [Status.WARN] * 2)


def test_one_cpu_for_both_threads_is_warned_of(plain):
    (check,) = placement.devices(plain.system(affinity=frozenset({2})))
    assert check.status is Status.WARN and "1 in this process's affinity mask" in check.advice
