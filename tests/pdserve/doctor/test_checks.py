"""Software, limits, network and files: each check on a machine where all is well, and on one where it is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.config import load_settings
from pdserve.doctor.checks import files, limits, network, run_checks, software
from pdserve.doctor.report import Status, exit_status
from pdserve.doctor.system import ShmSpace
from tests.pdserve.doctor.made_up import GIB
from tests.transport import fake_sysfs
from transport.fabric.leftovers import find_leftovers

MIB = 1 << 20


@pytest.mark.parametrize("shape", [fake_sysfs.p5, fake_sysfs.p5en, fake_sysfs.dgx_h100, fake_sysfs.pcie_box])
def test_machines_as_they_should_be_get_nothing_but_ok(machine, shape):
    checks = run_checks(machine(shape).system())
    assert {check.status for check in checks} == {Status.OK}, [c for c in checks if c.status is not Status.OK]
    assert len({check.name for check in checks}) == len(checks)


def test_a_plain_server_is_only_warned(plain):
    checks = run_checks(plain.system())
    assert [check.name for check in checks if check.status is not Status.OK] == ["rdma-devices"]
    assert exit_status(checks) == 0


def test_a_machine_about_which_nothing_is_known_is_reported_not_crashed_on(plain, tmp_path):
    empty = tmp_path / "empty"
    checks = run_checks(plain.system(sys_root=empty, proc_root=empty, dev_root=empty, shm=None))
    assert {check.name for check in checks if check.status is Status.FAIL} == {"dev-shm"}


def test_python(plain):
    assert software.python(plain.system()).found == "3.11.7"
    assert software.python(plain.system(python=(3, 10, 2))).status is Status.FAIL


@pytest.mark.parametrize(("release", "status"), [("6.8.0-1024-aws", "ok"), ("5.3-rc1", "ok"), ("4.18.0", "warn")])
def test_kernel(plain, release, status):
    plain.write_proc("sys/kernel/osrelease", release)
    check = software.kernel(plain.system())
    assert (check.status, check.found) == (status, release)


@pytest.mark.parametrize(
    ("version", "status"), [("2.60.0", "ok"), ("2.99.1", "ok"), ("2.9.0", "warn"), ("3.0.0", "warn"), (None, "fail")]
)
def test_ray(plain, version, status):
    check = software.ray(plain.system(packages={"ray": version} if version else {}))
    assert check.status == status and ("pip install 'ray[serve]>=2.60,<3'" in check.advice) == (status != "ok")


def test_numba(plain):
    assert software.numba(plain.system()).status is Status.OK
    assert software.numba(plain.system(packages={})).status is Status.WARN


@pytest.mark.parametrize(("memlock", "status"), [(None, "ok"), (8 * GIB, "warn"), (64 << 10, "fail")])
def test_memlock_binds_where_there_is_rdma(box, memlock, status):
    assert limits.memlock(box.system(memlock_bytes=memlock)).status == status


def test_memlock_does_not_matter_without_rdma(plain):
    check = limits.memlock(plain.system(memlock_bytes=64 << 10))
    assert (check.status, check.found) == (Status.OK, "64 KiB; only RDMA needs more")


def test_memlock_does_not_bind_who_may_lock_anyway(box):
    box.write_proc("self/status", "CapEff:\t000001ffffffffff")
    check = limits.memlock(box.system(memlock_bytes=64 << 10))
    assert check.status is Status.OK and "CAP_IPC_LOCK" in check.found


@pytest.mark.parametrize(
    ("space", "status"),
    [
        (ShmSpace(2 * GIB, 2 * GIB), "ok"),
        (ShmSpace(512 * MIB, 500 * MIB), "warn"),
        (ShmSpace(64 * MIB, 64 * MIB), "fail"),  # docker's default
        (ShmSpace(2 * GIB, 10 * MIB), "fail"),
        (None, "fail"),
    ],
)
def test_dev_shm(plain, space, status):
    check = limits.dev_shm(plain.system(shm=space))
    assert check.status == status and ("--shm-size" in check.advice) == (status != "ok")


def test_dev_shm_that_is_needed_grows_with_the_pairs_of_nodes(plain):
    def needed(**overrides: object) -> int:
        return limits.needed_shm_bytes(plain.system(settings=load_settings(None, overrides)))

    many = {"deployment.prefill": 2, "deployment.decode": 4}
    assert needed(**many) - needed() == 7 * 2 * limits.SHM_ENDPOINT_BYTES
    assert needed(**many, **{"transport.provider": "tcp"}) == needed(**{"deployment.colocated": 1})


def test_huge_pages(box):
    assert limits.huge_pages(box.system()).found == "0 reserved of 2048 kB; transparent: madvise"
    box.sysfs.write("kernel/mm/transparent_hugepage/enabled", "always madvise [never]")
    assert limits.huge_pages(box.system()).status is Status.WARN
    box.write_proc("meminfo", "HugePages_Total:    1024\nHugepagesize:       2048 kB")
    assert limits.huge_pages(box.system()).status is Status.OK


@pytest.mark.parametrize(
    ("cgroup", "folder", "file", "text"),
    [
        ("0::/kubepods/pod1", "kubepods", "cpu.max", "150000 100000"),  # the tightest is further up
        ("0::/", "unified", "cpu.max", "150000 100000"),
        ("0::/../gone", "", "cpu.max", "150000 100000"),
        ("5:cpu,cpuacct:/docker/abc", "cpu,cpuacct/docker/abc", "cpu.cfs_quota_us", "150000"),
        ("5:cpu,cpuacct:/docker/abc", "cpu", "cpu.cfs_quota_us", "150000"),
    ],
)
def test_cpu_quota_is_found_in_either_version(plain, cgroup, folder, file, text):
    assert limits.cpu_quota(plain.system()).found == "none; 4 CPUs"
    plain.write_proc("self/cgroup", cgroup)
    plain.sysfs.write("fs/cgroup/kubepods/pod1/cpu.max", "max 100000")
    plain.sysfs.write(f"fs/cgroup/{folder}/{file}", text)
    check = limits.cpu_quota(plain.system())
    assert (check.status, check.found) == (Status.WARN, "1.5 of 4 CPUs")
    assert limits.cpu_quota(plain.system(affinity=frozenset({0}))).status is Status.OK


def test_congestion_control(plain):
    plain.write_proc("sys/net/ipv4/tcp_congestion_control", "cubic")
    assert network.congestion_control(plain.system()).status is Status.OK
    plain.write_proc("sys/net/ipv4/tcp_congestion_control", "bbr")
    check = network.congestion_control(plain.system())
    assert check.status is Status.WARN and "tcp_congestion_control=cubic" in check.advice


def test_ipv6(plain):
    assert network.ipv6(plain.system()).found == "on"
    plain.write_proc("sys/net/ipv6/conf/all/disable_ipv6", "1")
    assert network.ipv6(plain.system()).status is Status.OK
    asked = load_settings(None, {"http.host": "::"})
    assert network.ipv6(plain.system(settings=asked)).status is Status.FAIL


def test_ports(plain):
    taken = {8000: "Address already in use"}
    checks = list(network.ports(plain.system(port_fault=lambda host, port: taken.get(port, ""))))
    assert [(check.name, check.status) for check in checks] == [
        ("port http", Status.WARN),
        ("port ray", Status.OK),
        ("port ray-dashboard", Status.OK),
    ]
    assert checks[0].found == "127.0.0.1 port 8000: Address already in use"
    asked = load_settings(None, {"http.port": 0, "ray_address": "10.0.0.1:6379"})
    assert [check.name for check in network.ports(plain.system(settings=asked))] == ["port http", "port ray"]


def test_leftovers_are_files_of_dead_processes(plain):
    assert files.leftovers(plain.system()).status is Status.OK
    plain.write_proc("41/stat", "41 (python) S 1")
    plain.write_proc("42/stat", "42 (python) Z 1")
    shm = plain.folder / "dev/shm"
    for name in ("41:0:1", "42:0:1", "43:1000:0:peer", "43:x", "sem.43"):
        (shm / name).write_bytes(bytes(MIB))
    check = files.leftovers(plain.system())
    assert check.status is Status.WARN and check.found.startswith("2 endpoint files") and "2 MiB" in check.found
    assert check.advice.endswith(f"rm '{shm}/42:0:1' '{shm}/43:1000:0:peer'")


def test_leftovers_of_this_machine_can_be_looked_for():
    assert not any(file.name.startswith(f"{os.getpid()}:") for file in find_leftovers(Path("/dev/shm")))
