"""Finds the transport libraries that this machine has, and which one a node would take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from transport.dll import wheel_candidates
from transport.ucx.dll import candidates as ucp_candidates

TIMEOUT_S = 60.0
FABRIC = "libfabric.so.1"


@dataclass(frozen=True, slots=True)
class Library:
    """One place where a library was looked for. `error` says why it cannot be loaded; "" if it can."""

    source: str
    """given, system, mpich wheel, libucx-cu12 wheel."""
    path: str
    version: str = ""
    providers: tuple[str, ...] = ()
    error: str = ""

    def __str__(self) -> str:
        return f"{self.version} from {self.path} ({self.source})" if not self.error else f"{self.source}: {self.error}"


@dataclass(frozen=True, slots=True)
class Libraries:
    """`fabric` and `ucp` are what a node would take, the others what else there is."""

    fabric: Library
    ucp: Library
    other_fabrics: tuple[Library, ...] = ()
    other_ucps: tuple[Library, ...] = ()


def find_libraries(given: str | None = None) -> Libraries:
    """`given`: the path of libfabric that the command line or the settings name."""
    wheel = next((str(path) for path in wheel_candidates() if path.exists()), None)
    fabric_places = {"system": FABRIC} | ({"mpich wheel": wheel} if wheel else {})
    ucp_places = {_ucp_source(path): path for path in ucp_candidates()}
    with ThreadPoolExecutor(max_workers=2) as pool:  # each waits for a process
        fabric = pool.submit(_find, "libfabric", given, fabric_places)
        ucp = pool.submit(_find, "libucp", None, ucp_places)
        taken, others = fabric.result()
        taken_ucp, other_ucps = ucp.result()
    return Libraries(taken, taken_ucp, others, other_ucps)


def _find(kind: str, given: str | None, places: Mapping[str, str]) -> tuple[Library, tuple[Library, ...]]:
    """(the one that a node takes, what else can be loaded from `places`)."""
    found = [probe(kind, source, path) for source, path in places.items()]
    taken = probe(kind, "given" if given else "", given or "")
    real = os.path.realpath(taken.path)
    others = [place for place in found if not place.error and os.path.realpath(place.path) != real]
    if not taken.error and not given:
        source = next((p.source for p in found if not p.error and os.path.realpath(p.path) == real), "found")
        taken = replace(taken, source=source)
    return taken, tuple(others)


def probe(kind: str, source: str, path: str) -> Library:
    """Loads a library in a process of its own and tells what it says of itself. `path` "": whichever a node takes."""
    paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    command = [sys.executable, "-m", "pdserve.doctor.probe", kind, path]
    try:
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Library(source, path, error=f"{path or kind} did not answer within {TIMEOUT_S:.0f} s")
    if done.returncode:
        fate = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        return Library(source, path, error=f"loading {path or kind} ended its process ({fate})")
    answer = json.loads(done.stdout)
    if "error" in answer:
        return Library(source, path, error=answer["error"])
    return Library(source, answer["path"], answer["version"], tuple(answer.get("providers", ())))


def _ucp_source(path: str) -> str:
    if "/" not in path:
        return "system"
    return "libucx-cu12 wheel" if "libucx" in Path(path).parts else "mpich wheel"
