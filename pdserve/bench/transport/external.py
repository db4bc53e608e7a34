"""Contestants that are programs of their own: fabtests' `fi_rma_bw` and UCX's `ucx_perftest`. They time themselves.

Each round starts a server and a client; only what the client reports counts. Their blocks lie in one hot buffer, in
order, so that they overstate what random pages can reach.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdserve.bench.transport.child_process import SideFailed
from pdserve.bench.transport.load import MOST_BLOCKS, Load
from pdserve.bench.transport.pair import Round

PATIENCE_S = 60.0
TRIES = 20
LEAST_BYTES = 256 << 20
Cpus = tuple[tuple[int, ...], tuple[int, ...]]
"""Of the client (which sends) and of the server."""
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Program:
    """How one is run. `command` takes (binary, provider, load, window, port); `bytes_per_s` reads what it printed."""

    system: str
    binary: str
    providers: tuple[str, ...]
    command: Callable[[str, str, Load, int, int], list[str]]
    bytes_per_s: Callable[[str], float]
    environment: tuple[tuple[str, str], ...] = ()


def fabtests_rate(printed: str) -> float:
    """Columns: bytes, #sent, #ack, total, time, MB/sec (decimal), usec/xfer, Mxfers/sec. Raises ValueError."""
    rows = [line.split() for line in printed.splitlines()]
    rates = [float(row[5]) for row in rows if len(row) == 8 and row[0] != "bytes"]
    if not rates:
        raise ValueError(f"no figures in {printed.strip()[-200:]!r}")
    return rates[-1] * 1e6


def perftest_rate(printed: str) -> float:
    """Columns by name, comma-separated; `overall_bw` is in MiB/s. Raises ValueError."""
    lines = [line.split(",") for line in printed.splitlines() if "," in line]
    for names, values in itertools.pairwise(lines):
        if "overall_bw" in names and len(names) == len(values):
            return float(values[names.index("overall_bw")]) * (1 << 20)
    raise ValueError(f"no figures in {printed.strip()[-200:]!r}")


def _times(load: Load) -> int:
    """They report a rate, so it need not be the blocks of the load; too few say more of the start than of the rate."""
    return max(load.blocks, min(LEAST_BYTES // load.block_bytes, MOST_BLOCKS))


def _fabtests(binary: str, provider: str, load: Load, window: int, port: int) -> list[str]:
    sizes = ["-S", str(load.block_bytes), "-I", str(_times(load)), "-W", str(window)]
    return [binary, "-p", provider, "-o", "writedata", *sizes, "-B", str(port), "-P", str(port)]


def _perftest(binary: str, _: str, load: Load, window: int, port: int) -> list[str]:
    times = _times(load)
    sizes = ["-s", str(load.block_bytes), "-n", str(times), "-w", str(max(1, times // 10)), "-O", str(window)]
    return [binary, "-t", "ucp_put_bw", *sizes, "-p", str(port), "-f", "-v"]


FABTESTS = Program("fabtests", "fi_rma_bw", ("tcp", "shm"), _fabtests, fabtests_rate)
PERFTEST = Program("ucx_perftest", "ucx_perftest", ("ucx",), _perftest, perftest_rate, (("UCX_TLS", "tcp"),))
PROGRAMS = (FABTESTS, PERFTEST)


def find_program(program: Program, folder: str | None = None) -> str | None:
    """Path of its binary, in `folder` before PATH; None where it is not installed."""
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PATH"))))
    return shutil.which(program.binary, path=path)


class External:
    """A program over one provider, with the interface of a pair as far as bandwidth goes."""

    def __init__(self, program: Program, binary: str, provider: str, window: int, cpus: Cpus) -> None:
        self.system, self.provider = program.system, provider
        self.about, self.modes = binary, ()
        self._program, self._binary, self._window, self._cpus = program, binary, window, cpus

    def verify(self, load: Load) -> Round:
        """One round; what it moves, nobody compares."""
        return self.round(load)

    def round(self, load: Load) -> Round:
        """Raises SideFailed."""
        command = self._program.command(self._binary, self.provider, load, self._window, _free_port())
        server = self._start(command, self._cpus[1])
        try:
            printed = self._client([*command, HOST], server)
            return Round(load.total_bytes / self._program.bytes_per_s(printed))
        except ValueError as error:
            raise SideFailed(f"{self.system} on {self.provider}: {error}") from error
        finally:
            if server.poll() is None:
                time.sleep(0.1)
                server.kill()
            server.communicate()

    def close(self) -> None:
        """It leaves nothing behind."""

    def _client(self, command: list[str], server: subprocess.Popen[str]) -> str:
        """The server may not listen yet; there is no sign of it, so the client is tried again."""
        said = ""
        for _ in range(TRIES):
            time.sleep(0.05)
            if server.poll() is not None:
                raise SideFailed(f"{self.system} on {self.provider}: the server ended with {server.returncode}")
            client = self._start(command, self._cpus[0])
            try:
                printed, said = client.communicate(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired as error:
                client.kill()
                client.communicate()
                raise SideFailed(f"{self.system} on {self.provider}: no end within {PATIENCE_S:.0f} s") from error
            if client.returncode == 0:
                return printed
        raise SideFailed(f"{self.system} on {self.provider}: {(said or printed).strip()[-200:]}")

    def _start(self, command: list[str], cpus: tuple[int, ...]) -> subprocess.Popen[str]:
        pinned = ["taskset", "-c", ",".join(map(str, cpus)), *command] if cpus and shutil.which("taskset") else command
        environment = {**os.environ, **dict(self._program.environment), **_libraries_beside(Path(self._binary))}
        return subprocess.Popen(
            pinned, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment
        )


def _libraries_beside(binary: Path) -> dict[str, str]:
    """For a program that was unpacked, not installed: its libraries lie beside it, and are nobody else's business."""
    prefix = binary.resolve().parents[1]
    if prefix in (Path("/"), Path("/usr"), Path("/usr/local")):
        return {}
    lib = prefix / "lib"
    multiarch = lib / str(sysconfig.get_config_var("MULTIARCH"))
    folders = [str(folder) for folder in (lib, multiarch, multiarch / "ucx") if folder.is_dir()]
    return {"LD_LIBRARY_PATH": os.pathsep.join([*folders, os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
