"""The folder on a node's host in which its ranks meet: for a socket and a rendezvous file, gone with the node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from pdserve.errors import ConfigError

_PREFIX = "pdserve-ranks-"


class RankFolder:
    """A fresh folder. What leaders that were killed have left behind is removed first: whoever lives holds a lock."""

    def __init__(self, parent: str | None = None) -> None:
        parent = parent or tempfile.gettempdir()
        _remove_leftovers(Path(parent))
        while True:
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            try:
                lock = _lock(self.path)
            except OSError as error:
                shutil.rmtree(self.path, ignore_errors=True)
                raise ConfigError(
                    f"the ranks of a node meet in a folder that they lock, and {parent} does not serve for that "
                    f"({error.strerror}): set TMPDIR to a local path on this host"
                ) from error
            if lock is not None:  # else another start has taken it for a leftover before it was locked
                self._lock = lock
                return

    def close(self) -> None:
        """Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _lock(folder: str | Path) -> int | None:
    """A descriptor that holds the lock of a folder for as long as it is open; None if that is taken, or no folder.

    Raises OSError where folders cannot be locked, or nothing can be opened.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:  # it has not been removed meanwhile
            return fd
    except BlockingIOError:
        pass
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _remove_leftovers(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            lock = _lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
