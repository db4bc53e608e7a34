"""Whether the machine is quiet enough to measure: a foreign process on a core halves what two spinning peers reach."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

LIMIT_CORES = 0.5
LOOK_S = 1.0
SHORT_LOOK_S = 0.1
_IDLE_COLUMNS = (3, 4)
"""idle and iowait."""


def busy_cores(look_s: float = LOOK_S, read: Callable[[], str] | None = None) -> float:
    """How many cores were busy, on average, over the next `look_s` seconds; by whatever runs on this machine.

    The load average would lag by a minute, and count what this program itself has just done.
    """
    read = read or _proc_stat
    before = read()
    time.sleep(look_s)
    return busy_between(before, read())


def busy_between(before: str, after: str) -> float:
    """Busy cores between two readings of /proc/stat."""
    first, second = _ticks(before), _ticks(after)
    passed = [b - a for a, b in zip(first, second, strict=True)]
    total = sum(passed)
    cores = sum(line.startswith("cpu") for line in after.splitlines()) - 1
    return cores * (total - sum(passed[i] for i in _IDLE_COLUMNS)) / total if total else 0.0


class Gate:
    """Holds measuring back while more than LIMIT_CORES are busy, for `patience_s` in all; warns where that is over.

    `looks` are the busy cores that it found at the beginning and before every section.
    """

    def __init__(self, patience_s: float, report: Callable[[str], None], busy: Callable[[float], float] = busy_cores):
        self.looks: list[float] = []
        self._patience_s = self._left_s = patience_s
        self._report, self._busy = report, busy
        self._warned = self._told = False

    def before_section(self) -> None:
        found = self._settled(LOOK_S)
        self.looks.append(found)
        if found > LIMIT_CORES and not self._warned:
            self._warned = True
            advice = "it did not become quiet" if self._patience_s else "end what else runs, or use --wait-quiet"
            busy = f"{found:.1f} of {os.cpu_count()} cores are busy already"
            self._report(f"warning: {busy}, the figures will be too low; {advice}")

    def before_round(self) -> None:
        """A short look, and only by someone who has time."""
        if self._left_s > 0:
            self._settled(SHORT_LOOK_S)

    def _settled(self, look_s: float) -> float:
        begun = time.monotonic()
        found = self._busy(look_s)
        while found > LIMIT_CORES and self._left_s > time.monotonic() - begun:
            if not self._told:
                self._told = True
                self._report(f"{found:.1f} cores are busy: waiting up to {self._left_s:.0f} s for a quiet machine")
            found = self._busy(look_s)
        self._left_s -= max(time.monotonic() - begun - look_s, 0.0)
        return found


def _proc_stat() -> str:
    return Path("/proc/stat").read_text()


def _ticks(stat: str) -> list[int]:
    """user nice system idle iowait irq softirq steal; guest times are within user."""
    return [int(field) for field in stat.splitlines()[0].split()[1:9]]
