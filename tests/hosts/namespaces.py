"""Two network namespaces joined by a shaped veth: two hosts on one, each with an address of its own.

They share what namespaces do not part: kernel, process ids, files and /dev/shm.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

RATE = "10gbit"
BURST = "4mb"  # what 10 Gbit/s moves in 3 ms: less, and the timer's grain would be the limit
QUEUED = "20ms"
UP_S = 10.0
_PREFIX = "pdserve-"


class NoNamespaces(Exception):
    """This machine or this user cannot make them; says why."""


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace."""

    name: str
    interface: str
    address: str

    def command(self, *argv: str) -> list[str]:
        """`argv`, to be run in this namespace."""
        return ["ip", "netns", "exec", self.name, *argv]

    @property
    def namespace(self) -> int:
        """Its number: the inode of `/proc/<pid>/ns/net` of the processes in it."""
        return os.stat(f"/run/netns/{self.name}").st_ino

    @property
    def bytes_received(self) -> int:
        """By the veth, headers included."""
        return int(self._link["stats64"]["rx"]["bytes"])

    @property
    def up(self) -> bool:
        return bool(self._link["operstate"] == "UP")

    @property
    def _link(self) -> dict[str, Any]:
        (link,) = json.loads(_run("ip", "-n", self.name, "-s", "-j", "link", "show", "dev", self.interface))
        return dict(link)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Gone afterwards; those of a run that was killed go with the next one. Raises NoNamespaces."""
    if os.geteuid():
        raise NoNamespaces("network namespaces need root")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NoNamespaces(f"{' and '.join(missing)} not found: install iproute2")
    pid = os.getpid()
    hosts = [Host(f"{_PREFIX}{pid}-{side}", "pd0", f"10.77.0.{number}") for number, side in enumerate("ab", start=1)]
    with contextlib.ExitStack() as undo:
        try:
            _remove_leftovers()
            for host in hosts:
                _run("ip", "netns", "add", host.name)
                undo.callback(subprocess.run, ["ip", "netns", "del", host.name], check=False)
            _join(hosts[0], hosts[1])
        except subprocess.CalledProcessError as error:
            raise NoNamespaces(f"`{' '.join(error.cmd)}`: {error.stderr.strip()}") from error
        yield hosts[0], hosts[1]


def _remove_leftovers() -> None:
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        owner = name.removeprefix(_PREFIX).split("-")[0]
        if name.startswith(_PREFIX) and not os.path.exists(f"/proc/{owner}"):
            _run("ip", "netns", "del", name)


def _join(a: Host, b: Host) -> None:
    _run(
        *("ip", "link", "add", a.interface, "netns", a.name, "type", "veth"),
        *("peer", "name", b.interface, "netns", b.name),
    )
    for host in (a, b):
        _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
        for interface in ("lo", host.interface):
            _run("ip", "-n", host.name, "link", "set", interface, "up")
        shape = ("root", "tbf", "rate", RATE, "burst", BURST, "latency", QUEUED)
        _run("tc", "-n", host.name, "qdisc", "add", "dev", host.interface, *shape)
    deadline = time.monotonic() + UP_S
    while not (a.up and b.up):  # the kernel says so a moment later; who looks for interfaces takes none before
        if time.monotonic() > deadline:
            raise NoNamespaces(f"the veth did not come up within {UP_S:.0f} s")
        time.sleep(0.02)


def _run(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout
