"""Memory as the kernel shares it out (PSS): what is mapped by several processes is counted once in all."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes. `shared` is memfd and /dev/shm: page pools and the transport's own segments."""

    total: int
    shared: int

    @property
    def beside_pool(self) -> int:
        return self.total - self.shared


def process_memory(pid: int) -> ProcessMemory | None:
    """None when the process is gone or not ours to read. Source: /proc/PID/smaps_rollup."""
    fields: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) * 1024
        return ProcessMemory(fields["Pss"], fields["Pss_Shmem"])
    return None


def tree_memory() -> int:
    """PSS in bytes of this process and everything below it."""
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{entry.name}/stat").read_text()
                parents[int(entry.name)] = int(stat.rsplit(")", 1)[1].split()[1])
    total = 0
    for pid in parents:
        ancestor: int | None = pid
        while ancestor and ancestor != os.getpid():
            ancestor = parents.get(ancestor)
        if ancestor == os.getpid():
            memory = process_memory(pid)
            total += memory.total if memory else 0
    return total
