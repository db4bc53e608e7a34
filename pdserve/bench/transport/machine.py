"""Where and with what was measured: figures mean nothing without it."""

from __future__ import annotations

import os
import platform
import socket
import time
from pathlib import Path
from typing import Any

from pdserve import __version__
from pdserve.bench.transport.opening import Contestants
from pdserve.bench.transport.plan import Plan


def configuration_of(plan: Plan, contestants: Contestants) -> dict[str, Any]:
    every = [*contestants.movers, *contestants.probes]
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "pdserve": __version__,
        "processor": processor_of(_read("/proc/cpuinfo")) or platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "tcp_congestion_control": congestion_control(),
        "hosts": 1 if plan.connect is None else 2,
        "rounds": plan.rounds,
        "window": plan.window,
        "memory_mib": plan.total_bytes >> 20,
        "order": "pages in random order on both sides, single writes in turn",
        "cpus": {"sender": list(plan.cpus[0]), "receiver": list(plan.cpus[1])},
        "systems": {f"{one.system} on {one.provider}": one.about for one in every},
        "load_average_before": os.getloadavg()[0],
    }


def congestion_control() -> str:
    """What a connection over loopback really gets: the system's, or that of the route."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connected:
        return connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def processor_of(cpuinfo: str) -> str:
    """The model name in /proc/cpuinfo; empty where there is none, as on Arm."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
