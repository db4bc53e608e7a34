"""One Ray cluster over several hosts: a raylet in each, started as an operator would, and ended by process id."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from actors.local_ray import descendants
from tests.hosts.namespaces import Host

PORT = 6379  # free in a namespace that was just made
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
CPUS = 4
OBJECT_STORE_BYTES = 100 << 20
START_S = 60.0
END_S = 30.0


@contextlib.contextmanager
def ray_over(hosts: Sequence[Host]) -> Iterator[str]:
    """The cluster's address. The first host is its head. Every process of it is gone afterwards."""
    address = f"{hosts[0].address}:{PORT}"
    with tempfile.TemporaryDirectory(prefix="pdh-", dir="/tmp") as folder, contextlib.ExitStack() as ending:
        # A short path: sockets lie below it. One folder per host, as hosts share none.
        for index, host in enumerate(hosts):
            at = Path(folder, str(index))
            role = [f"--address={address}"] if index else ["--head", f"--port={PORT}", "--include-dashboard=false"]
            ending.callback(_end, _start(host, role, at))
        yield address


def _start(host: Host, role: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Returns once the raylet listens."""
    folder.mkdir()
    command = [
        *(str(Path(sys.executable).with_name("ray")), "start", "--block", *role, f"--temp-dir={folder}"),
        *(f"--node-ip-address={host.address}", f"--num-cpus={CPUS}", "--num-gpus=0"),
        f"--object-store-memory={OBJECT_STORE_BYTES}",
    ]
    # Its note on which cluster runs here goes into the folder, too: no other program shall join by accident.
    environment = os.environ | ENVIRONMENT | {"RAY_TMPDIR": str(folder)}
    log = folder / "start.log"
    with log.open("wb") as out:
        started = subprocess.Popen(
            host.command(*command), stdout=out, stderr=out, env=environment, start_new_session=True
        )
    deadline = time.monotonic() + START_S
    while not (listening := "Ray runtime started" in log.read_text()):
        if started.poll() is not None or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    if not listening:
        _end(started)
        raise AssertionError(f"ray did not start in {host.name}:\n{log.read_text()}")
    return started


def _end(started: subprocess.Popen[bytes]) -> None:
    below = [os.pidfd_open(pid) for pid in descendants(started.pid)]
    started.send_signal(signal.SIGTERM)  # it ends what it started, mostly
    with contextlib.suppress(subprocess.TimeoutExpired):
        started.wait(END_S)
    started.kill()
    started.wait()
    for process in below:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)
