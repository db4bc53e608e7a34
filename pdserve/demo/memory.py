"""Memory as the kernel shares it out (PSS): what is mapped by several processes is counted once in all."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from actors.local_ray import descendants


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
    mine = os.getpid()
    sizes = (process_memory(pid) for pid in {mine, *descendants(mine)})
    return sum(size.total for size in sizes if size is not None)
