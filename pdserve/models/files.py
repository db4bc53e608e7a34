"""Files that several processes may want to make at once."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.errors import ModelError


@contextmanager
def file_lock(target: Path) -> Iterator[None]:
    """One process at a time makes `target`; the others wait here and find it made. Raises ModelError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_name(f".{target.name}.lock").open("w")
    except OSError as error:
        raise ModelError(f"cannot write to {target.parent} ({error.strerror}); set PDSERVE_CACHE elsewhere") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
