"""The benchmark's end of a side: a process of this host, or one that a listener on another host starts."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, cast

from pdserve.bench.transport import wire
from pdserve.bench.transport.load import SideSpec

CHILD = Path(__file__).with_name("child.py")
PATIENCE_S = 120.0


class SideFailed(Exception):
    """A side of a contestant raised, died, or did not answer in time; the message says which and what it said."""


class Child:
    """A side that can be asked. `end` ends its process and returns its last words."""

    def __init__(self, spec: SideSpec, questions: BinaryIO, answers: BinaryIO, end: Callable[[], str]) -> None:
        self.name = f"{spec.system} on {spec.provider}, {'sender' if spec.sends else 'receiver'}"
        self._questions, self._answers, self._end = questions, answers, end
        self._write(asdict(spec))

    def ask(self, method: str, *arguments: Any) -> None:
        """Raises SideFailed. The next `answer` is the one to this."""
        self._write([method, arguments])

    def answer(self) -> Any:
        """Raises SideFailed."""
        if not select.select([self._answers], [], [], PATIENCE_S)[0]:
            raise SideFailed(f"{self.name}: no answer within {PATIENCE_S:.0f} s")
        line = self._answers.readline()
        if not line:
            raise SideFailed(f"{self.name} has ended: {self.close()}")
        well, value = wire.read(line)
        if not well:
            raise SideFailed(f"{self.name}: {value}")
        return value

    def close(self) -> str:
        """Returns the last line that it wrote to its standard error. Idempotent."""
        for stream in (self._questions, self._answers):
            with suppress(OSError):
                stream.close()
        return self._end()

    def _write(self, value: Any) -> None:
        try:
            wire.write(self._questions, value)
        except OSError as error:
            raise SideFailed(f"{self.name} has ended: {self.close()}") from error


def start_here(spec: SideSpec, python: str = sys.executable) -> Child:
    """Raises SideFailed."""
    said = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
    try:
        process = subprocess.Popen([python, str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said)
    except OSError as error:
        said.close()
        raise SideFailed(f"{spec.system}: cannot start {python}: {error.strerror}") from error

    def end() -> str:
        ended(process)
        if said.closed:
            return ""
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
        said.close()
        return lines[-1] if lines else f"exit status {process.returncode}"

    return Child(spec, cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout), end)


def start_there(spec: SideSpec, address: tuple[str, int]) -> Child:
    """On the host where `pdserve bench transport --listen` runs. Raises SideFailed."""
    try:
        connection = socket.create_connection(address, timeout=10)
    except OSError as error:
        where = "{}:{}".format(*address)
        advice = "start `pdserve bench transport --listen` there first"
        raise SideFailed(f"nothing listens on {where} ({error}): {advice}") from error
    connection.settimeout(None)

    def end() -> str:
        connection.close()
        return "its last words are on the other host"

    return Child(spec, connection.makefile("wb"), connection.makefile("rb"), end)


def ended(process: subprocess.Popen[Any], patience_s: float = 10.0) -> None:
    """Waits for the process to end by itself, then kills it."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
