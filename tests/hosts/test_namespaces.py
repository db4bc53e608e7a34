"""The two hosts are what the other tests take them for."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.hosts.namespaces import Host

BYTES = 1 << 30
SHAPED_GBPS = 10
SINK = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    taken, _ = server.accept()
    buffer, total = bytearray(1 << 20), 0
    while count := taken.recv_into(buffer):
        total += count
    print(total, flush=True)
"""
SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as out:
    block = bytes(1 << 20)
    for _ in range(int(sys.argv[3]) >> 20):
        out.sendall(block)
"""


def test_a_plain_socket_between_them_is_held_to_the_rate(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    before = b.bytes_received
    sink = subprocess.Popen(b.command(sys.executable, "-c", SINK, b.address), stdout=subprocess.PIPE, text=True)
    with sink:
        assert sink.stdout is not None
        port = sink.stdout.readline().strip()
        started = time.monotonic()
        subprocess.run(a.command(sys.executable, "-c", SOURCE, b.address, port, str(BYTES)), check=True, timeout=60)
        assert int(sink.stdout.readline()) == BYTES
        elapsed_s = time.monotonic() - started
    assert b.bytes_received - before >= BYTES
    # The shaper's bound only: how much slower this machine is says nothing.
    assert BYTES * 8 / elapsed_s / 1e9 <= SHAPED_GBPS


def test_neither_sees_the_other_by_loopback(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    sink = subprocess.Popen(b.command(sys.executable, "-c", SINK, "127.0.0.1"), stdout=subprocess.PIPE, text=True)
    with sink:
        assert sink.stdout is not None
        port = sink.stdout.readline().strip()
        tried = subprocess.run(
            a.command(sys.executable, "-c", SOURCE, "127.0.0.1", port, "0"), capture_output=True, text=True, check=False
        )
        assert "ConnectionRefusedError" in tried.stderr
        sink.kill()


@pytest.mark.usefixtures("hosts")
def test_nothing_is_left_of_them_even_after_a_kill() -> None:
    code = "import os\nfrom tests.hosts.namespaces import two_hosts\nwith two_hosts() as (a, b):"
    code += " print(a.name, b.name, flush=True)"
    ended = _python(code).stdout.split()
    killed = _python(code + "; os.kill(os.getpid(), 9)").stdout.split()
    assert len(ended) == len(killed) == 2
    assert not _listed() & set(ended) and _listed() >= set(killed)
    _python(code)
    assert not _listed() & set(killed)


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


def _listed() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}
