"""Interpreter, kernel and the packages that decide whether and how fast nodes run."""

from __future__ import annotations

import re

from pdserve.doctor.report import Check, fail, ok, warn
from pdserve.doctor.system import System

PYTHON = (3, 11)
RAY = ((2, 60), (3, 0))
PIDFD_KERNEL = (5, 3)


def python(system: System) -> Check:
    found = ".".join(map(str, system.python))
    if system.python[:2] < PYTHON:
        return fail("python", found, f"pdserve needs Python {_dotted(PYTHON)} or newer: make an environment with one")
    return ok("python", found)


def kernel(system: System) -> Check:
    release = system.proc("sys/kernel/osrelease") or "unknown"
    if system.kernel < PIDFD_KERNEL:
        return warn(
            "kernel",
            release,
            f"before Linux {_dotted(PIDFD_KERNEL)} there is no pidfd: a killed node of the same host is noticed "
            "only when a deadline passes; update the kernel",
        )
    return ok("kernel", release)


def ray(system: System) -> Check:
    """Read from the package's metadata: importing Ray takes seconds."""
    first, end = RAY
    found = system.packages.get("ray")
    install = f"pip install 'ray[serve]>={_dotted(first)},<{end[0]}'"
    if found is None:
        return fail("ray", "not installed", f"nodes are Ray actors: {install}")
    if not first <= _numbers(found) < end:
        return warn("ray", found, f"pdserve is written for Ray {_dotted(first)} up to {end[0]}: {install}")
    return ok("ray", found)


def numba(system: System) -> Check:
    found = system.packages.get("numba")
    if found is None:
        return warn(
            "numba",
            "not installed",
            "writes are posted by ctypes, at some hundred times the cost of a compiled loop: pip install numba",
        )
    return ok("numba", f"{found}: the data path runs compiled")


def _numbers(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
