"""Proof that a process on this host has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdserve.messenger.liveness import PeerWatch, host_identity
from pdserve.types import Incarnation
from tests.pdserve.engine.toy import eventually

ONE, TWO = Incarnation(1), Incarnation(2)


@pytest.fixture
def watch() -> Iterator[PeerWatch]:
    watch = PeerWatch()
    yield watch
    watch.close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_killed_process_is_reported_once(watch: PeerWatch, process: subprocess.Popen[bytes]) -> None:
    watch.add(ONE, process.pid)
    watch.add(TWO, os.getpid())
    assert watch.ended() == []
    process.kill()  # not reaped yet: a zombie has ended too
    found: list[Incarnation] = []
    eventually(lambda: bool(found.extend(watch.ended()) or found), 20)
    assert found == [ONE] and watch.ended() == []


def test_a_process_that_is_not_there_is_reported(watch: PeerWatch, process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    watch.add(ONE, process.pid)
    assert watch.ended() == [ONE] and watch.ended() == []


def test_what_was_removed_is_not_reported(watch: PeerWatch, process: subprocess.Popen[bytes]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    watch.add(ONE, process.pid)
    watch.remove(ONE)
    watch.remove(ONE)
    process.kill()
    process.wait()
    assert watch.ended() == [] and len(os.listdir("/proc/self/fd")) == before


def test_without_pidfd_there_is_no_proof(watch: PeerWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    watch.add(ONE, os.getpid())
    assert watch.ended() == []


def test_processes_of_one_host_agree_on_its_identity() -> None:
    code = "from pdserve.messenger.liveness import host_identity; print(host_identity())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host_identity() != ""
