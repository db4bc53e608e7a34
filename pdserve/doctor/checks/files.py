"""What killed processes left in /dev/shm."""

from __future__ import annotations

from pdserve.doctor.report import Check, ok, warn
from pdserve.doctor.system import System
from transport.fabric.leftovers import find_leftovers


def leftovers(system: System) -> Check:
    files = find_leftovers(system.shm_folder, system.proc_root)
    if not files:
        return ok("leftovers", "none in /dev/shm")
    size = sum(file.stat().st_size for file in files if file.exists())
    names = " ".join(f"'{file}'" for file in files)
    return warn(
        "leftovers",
        f"{len(files)} endpoint files of dead processes in /dev/shm, {size >> 20} MiB",
        f"unless their processes run in another container that shares this /dev/shm: rm {names}",
    )
