"""Which NICs and CPUs each device gets, on machines of real shapes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.transport import fake_sysfs as fake
from transport import sysfs
from transport.topology import Nearness, Topology, distance, fabric_nics, place, read_topology


def by_name(topology: Topology) -> dict[str, tuple[str, ...]]:
    """NIC names per GPU address."""
    return {p.device.pci: tuple(nic.name for nic in p.nics) for p in place(topology) if p.device is not None}


def check_cpus(topology: Topology) -> None:
    """Every thread has a physical core of its own, on its device's NUMA node."""
    placements = place(topology)
    core_of = {cpu: core for core in topology.cores for cpu in core}
    cpus = [cpu for p in placements for cpu in (p.worker_cpu, p.watcher_cpu)]
    assert max(Counter(core_of[cpu] for cpu in cpus).values()) == 1
    for p in placements:
        assert p.device is not None
        assert {p.worker_cpu, p.watcher_cpu} <= set(topology.numa_cpus[p.device.numa])


@pytest.mark.parametrize(("machine", "per_gpu", "gbps"), [(fake.p5, 4, 100), (fake.p5en, 2, 200)])
def test_efa_machines_give_each_gpu_the_nics_of_its_switch(machine, per_gpu, gbps, tmp_path):
    topology = read_topology(machine(tmp_path).root)
    assert [gpu.index for gpu in topology.gpus] == list(range(8)) and len(topology.nics) == 8 * per_gpu
    assert {(nic.link_layer, nic.driver, nic.speed_gbps, nic.up) for nic in topology.nics} == {
        ("EFA", "efa", float(gbps), True)
    }
    for i, placement in enumerate(place(topology)):
        assert [nic.rail for nic in placement.nics] == list(range(i * per_gpu, (i + 1) * per_gpu))
        assert {distance(placement.device, nic)[0] for nic in placement.nics} == {Nearness.SWITCH}
        assert {nic.numa for nic in placement.nics} == {placement.device.numa} == {i // 4}
    check_cpus(topology)


def test_dgx_gives_each_gpu_its_own_connectx(tmp_path):
    topology = read_topology(fake.dgx_h100(tmp_path).root)
    assert len(topology.gpus) == 8  # neither the BMC's display nor the NVSwitch
    assert list(by_name(topology).values()) == [
        (name,) for name in ("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11")
    ]
    check_cpus(topology)


def test_rails_follow_the_pci_tree_and_count_every_nic(tmp_path):
    topology = read_topology(fake.dgx_h100(tmp_path).root)
    assert [nic.rail for nic in topology.nics] == list(range(10))
    assert [nic.pci for nic in topology.nics] == sorted(nic.pci for nic in topology.nics)
    # The storage NICs have rails of their own, so that a rail means the same whichever NICs are used.
    assert {nic.name: nic.rail for nic in topology.nics}["mlx5_1"] == 1


def test_gpus_of_a_socket_share_its_one_nic(tmp_path):
    topology = read_topology(fake.pcie_box(tmp_path).root)
    assert by_name(topology) == {
        "0000:01:00.0": ("mlx5_0",),
        "0000:02:00.0": ("mlx5_0",),
        "0000:81:00.0": ("mlx5_1",),
        "0000:82:00.0": ("mlx5_1",),
    }
    check_cpus(topology)


def test_nearness_rises_up_the_tree(tmp_path):
    machine = fake.FakeSysfs(tmp_path)
    machine.gpu("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0", 0)
    for name, path, numa in (
        ("switch", "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0", 0),
        ("port", "pci0000:10/0000:10:01.0/0000:15:00.0", 0),
        ("bridge", "pci0000:10/0000:10:02.0/0000:16:00.0", 0),
        ("node", "pci0000:20/0000:20:01.0/0000:21:00.0", 0),
        ("other", "pci0000:80/0000:80:01.0/0000:81:00.0", 1),
    ):
        machine.nic(name, path, numa)
    topology = read_topology(tmp_path)
    ranked = sorted(topology.nics, key=lambda nic: distance(topology.gpus[0], nic))
    assert [nic.name for nic in ranked] == ["switch", "port", "bridge", "node", "other"]
    assert [distance(topology.gpus[0], nic)[0] for nic in ranked] == list(Nearness)
    for i, nic in enumerate(ranked):  # whichever are there, the nearest is taken
        (only,) = place(topology, nic_names=[nic.name for nic in ranked[i:]])
        assert only.nics == (nic,)


@pytest.mark.parametrize(("gpus", "nics", "loads"), [(2, 2, [1, 1]), (2, 4, [2, 2]), (2, 5, [2, 3]), (3, 2, [2, 2, 2])])
def test_equally_near_nics_are_divided_or_shared(gpus, nics, loads, tmp_path):
    machine = fake.FakeSysfs(tmp_path)
    for i in range(gpus):  # as in a virtual machine: everything on one bus
        machine.gpu(f"pci0000:00/0000:00:0{i}.0")
    for i in range(nics):
        machine.nic(f"mlx5_{i}", f"pci0000:00/0000:00:1{i}.0")
    placements = place(read_topology(tmp_path))
    assert [len(p.nics) for p in placements] == loads
    assert {nic.name for p in placements for nic in p.nics} == {f"mlx5_{i}" for i in range(nics)}


def test_a_nic_without_gpu_beside_it_serves_none_that_has_a_nearer_one(tmp_path):
    machine = fake.pcie_box(tmp_path)
    machine.nic("mlx5_2", "pci0000:c0/0000:c0:01.0/0000:c5:00.0", 1, layer="Ethernet", gbps=100)
    topology = read_topology(tmp_path)
    assert "mlx5_2" in {nic.name for nic in topology.nics}
    assert all("mlx5_2" not in names for names in by_name(topology).values())


def test_a_nic_that_is_down_gives_way_to_the_next_nearest(tmp_path):
    machine = fake.pcie_box(tmp_path)
    machine.write("class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    topology = read_topology(tmp_path)
    assert set(by_name(topology).values()) == {("mlx5_1",)}
    assert [(nic.up, nic.rail) for nic in topology.nics] == [(False, 0), (True, 1)]
    named = place(topology, nic_names=["mlx5_0"])
    assert all(nic.name == "mlx5_0" for p in named for nic in p.nics)


def test_slow_and_foreign_nics_carry_no_blocks(tmp_path):
    machine = fake.FakeSysfs(tmp_path)
    machine.gpu("pci0000:00/0000:00:01.0")
    machine.nic("fast", "pci0000:00/0000:00:02.0", gbps=400)
    machine.nic("half", "pci0000:00/0000:00:03.0", gbps=200)
    machine.nic("slow", "pci0000:00/0000:00:04.0", gbps=100)
    machine.nic("lan", "pci0000:00/0000:00:05.0", layer="Ethernet", gbps=400)
    assert [nic.name for nic in fabric_nics(read_topology(tmp_path))] == ["fast", "half"]


def test_a_name_that_is_not_there_is_refused(tmp_path):
    topology = read_topology(fake.pcie_box(tmp_path).root)
    with pytest.raises(ValueError, match="no NIC mlx5_7 in this node; it has: mlx5_0, mlx5_1"):
        place(topology, nic_names=["mlx5_7", "mlx5_0"])


def test_without_gpu_the_cpus_get_all_nics_and_cores_of_their_node(tmp_path):
    machine = fake.FakeSysfs(tmp_path)
    machine.cpus(nodes=2, cores_per_node=8)
    for i in range(2):
        machine.nic(f"mlx5_{i}", f"pci0000:80/0000:80:01.0/0000:81:00.{i}", 1)
    (only,) = place(read_topology(tmp_path))
    assert only.device is None and [nic.name for nic in only.nics] == ["mlx5_0", "mlx5_1"]
    assert (only.worker_cpu, only.watcher_cpu) == (8, 9)


def test_without_anything_there_are_still_cpus(tmp_path):
    (only,) = place(read_topology(fake.plain_server(tmp_path).root))
    assert only.nics == () and only.device is None
    assert (only.worker_cpu, only.watcher_cpu) == (1, 2)  # CPU 0 has the interrupts
    (only,) = place(read_topology(tmp_path / "nothing"))
    assert only.worker_cpu >= 0


def test_missing_numa_files_fall_back_to_all_cpus(tmp_path):
    machine = fake.FakeSysfs(tmp_path)
    machine.cpus(nodes=1, cores_per_node=8, numa=False)
    for i in range(2):
        machine.gpu(f"pci0000:{i}0/0000:{i}0:01.0/0000:{i}1:00.0", -1 if i else None)
        machine.nic(f"mlx5_{i}", f"pci0000:{i}0/0000:{i}0:02.0/0000:{i}2:00.0")
    topology = read_topology(tmp_path)
    assert topology.numa_cpus == {} and {gpu.numa for gpu in topology.gpus} == {-1}
    assert list(by_name(topology).values()) == [("mlx5_0",), ("mlx5_1",)]
    assert [(p.worker_cpu, p.watcher_cpu) for p in place(topology)] == [(1, 2), (3, 4)]


def test_affinity_restricts_and_hyperthreads_come_after_cores(tmp_path):
    machine = fake.FakeSysfs(tmp_path)
    machine.cpus(nodes=1, cores_per_node=4)  # core 1 is CPUs 1 and 5
    machine.gpu("pci0000:00/0000:00:01.0", 0)
    machine.gpu("pci0000:00/0000:00:02.0", 0)
    topology = read_topology(tmp_path)

    def cpus(affinity: set[int] | None) -> list[int]:
        return [cpu for p in place(topology, affinity) for cpu in (p.worker_cpu, p.watcher_cpu)]

    assert cpus(None) == [1, 2, 3, 0]
    assert cpus({0, 1, 5}) == [1, 0, 5, 1]
    assert cpus({2, 6}) == [2, 6, 2, 6]
    assert cpus({3}) == [3, 3, 3, 3]
    assert cpus({99}) == cpus(None)


def test_a_mask_outside_the_device_s_node_is_obeyed(tmp_path):
    topology = read_topology(fake.pcie_box(tmp_path).root)
    placements = place(topology, affinity=range(4))  # all of node 0
    assert {cpu for p in placements for cpu in (p.worker_cpu, p.watcher_cpu)} <= set(range(4))


def test_soft_roce_has_no_pci_device(tmp_path):
    topology = read_topology(fake.soft_roce(tmp_path).root)
    assert [(nic.name, nic.pci, nic.driver, nic.rail, nic.up) for nic in topology.nics] == [
        ("rxe0", None, "rxe", 0, True),
        ("rxe1", None, "rxe", 1, True),
    ]
    (only,) = place(topology)
    assert [nic.name for nic in only.nics] == ["rxe0", "rxe1"]


def test_soft_roce_over_a_real_card_is_no_match_for_hardware(tmp_path):
    machine = fake.pcie_box(tmp_path)
    machine.rxe("rxe0", "eth0", tmp_path / "devices/pci0000:00/0000:00:03.0/0000:41:00.0")
    topology = read_topology(tmp_path)
    assert topology.nics[-1].name == "rxe0" and topology.nics[-1].pci is None
    assert all("rxe0" not in names for names in by_name(topology).values())


def test_of_two_ports_the_one_that_is_up_counts(tmp_path):
    machine = fake.FakeSysfs(tmp_path)
    machine.nic("mlx4_0", "pci0000:00/0000:00:01.0", gbps=40)
    for file, text in (("state", "1: DOWN"), ("link_layer", "Ethernet"), ("rate", "100 Gb/sec (4X EDR)")):
        machine.write(f"class/infiniband/mlx4_0/ports/2/{file}", text)
    (nic,) = read_topology(tmp_path).nics
    assert nic.up and nic.speed_gbps == 40 and nic.link_layer == "InfiniBand"


def test_gid_tables_leave_out_empty_entries(tmp_path):
    machine = fake.pcie_box(tmp_path)
    machine.gid("mlx5_0", 2, "0000:0000:0000:0000:0000:0000:0000:0000")
    assert [(gid.index, gid.kind, gid.netdev) for gid in sysfs.gids(tmp_path, "mlx5_0", 1)] == [
        (0, "IB/RoCE v1", "eth0"),
        (1, "RoCE v2", "eth0"),
        (3, "RoCE v2", "eth0"),
    ]


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8,10-11", (0, 1, 2, 3, 8, 10, 11)), ("5", (5,)), ("", ()), ("no list", ())]
)
def test_cpu_lists(text, cpus):
    assert sysfs.parse_cpus(text) == cpus


def test_this_machine_can_be_read():
    topology = read_topology(Path("/sys"))
    assert topology.cpus
    assert all({p.worker_cpu, p.watcher_cpu} <= set(topology.cpus) for p in place(topology))
