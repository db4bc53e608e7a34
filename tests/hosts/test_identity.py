"""Who counts as on one host, and which interface another one is reached by."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from pdserve.messenger.liveness import host_identity
from tests.hosts.client import ROOT
from tests.hosts.namespaces import Host

IDENTITY = "from pdserve.messenger.liveness import host_identity; print(host_identity())"
NIC = """
import sys
from transport.errors import TransportError
from transport.open import open_transport
try:
    with open_transport("tcp", nics=tuple(sys.argv[1:]) or None) as transport:
        print(transport.description)
except TransportError as error:
    print(error)
"""


def run(*command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    return ran.stdout.strip()


def test_a_network_namespace_of_its_own_parts_no_process_from_its_host(hosts: tuple[Host, Host]) -> None:
    """Process ids and /dev/shm are what `shm` and the watch over peers need, and both are shared."""
    for host in hosts:
        assert run(*host.command(sys.executable, "-c", IDENTITY)) == host_identity()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting needs root and util-linux")
def test_a_dev_shm_of_its_own_does() -> None:
    script = f'mount -t tmpfs none /dev/shm && exec {sys.executable} -c "$0"'
    apart = run("unshare", "--mount", "sh", "-c", script, IDENTITY)
    assert apart and apart != host_identity()
    assert apart.split(":shm:")[0] == host_identity().split(":shm:")[0]


@pytest.mark.parametrize("named", [(), ("pd0",), ("10.77.0.0/24",)], ids=["none", "interface", "network"])
def test_tcp_takes_the_interface_that_other_hosts_reach(hosts: tuple[Host, Host], named: tuple[str, ...]) -> None:
    """The same setting on both hosts, and on each its own address."""
    for host in hosts:
        said = run(*host.command(sys.executable, "-c", NIC, *named))
        assert said.startswith(f"tcp over {host.address},"), said


def test_another_hosts_address_is_refused_with_what_to_do_instead(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    said = run(*b.command(sys.executable, "-c", NIC, a.address))
    assert f"no interface of this machine has the address {a.address}" in said and "name the interface" in said
    said = run(*b.command(sys.executable, "-c", NIC, "10.78.0.0/24"))
    assert "has no NIC '10.78.0.0/24'" in said and f"pd0 ({b.address})" in said
