"""What the shm provider leaves behind when a process is killed: files of some 15 MB in /dev/shm."""

from __future__ import annotations

import os
import re
from pathlib import Path

_SHM = Path("/dev/shm")


def remove_leftovers(pid: int, folder: Path = _SHM) -> int:
    """Removes the endpoint files of a process that is known to be dead; returns how many there were.

    Raises ValueError if the process lives.
    """
    if (Path("/proc") / str(pid)).exists() and not _is_zombie(pid):
        raise ValueError(f"process {pid} is alive: its endpoints are in use")
    pattern = re.compile(rf"{pid}:{os.getuid()}:\d+(:\w+)?")
    files = [file for file in folder.iterdir() if pattern.fullmatch(file.name)]
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def find_leftovers(folder: Path = _SHM, proc: Path = Path("/proc")) -> list[Path]:
    """Endpoint files, of any user, whose process does not live as far as this pid namespace can tell."""
    pattern = re.compile(r"(\d+):\d+:\d+(:\w+)?")
    names = [(file, pattern.fullmatch(file.name)) for file in folder.iterdir()] if folder.is_dir() else []
    return sorted(file for file, match in names if match and _is_zombie(int(match[1]), proc))


def _is_zombie(pid: int, proc: Path = Path("/proc")) -> bool:
    try:
        return (proc / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
