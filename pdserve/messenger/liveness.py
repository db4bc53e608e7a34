"""Proof that a peer process on this host is gone.

A pidfd becomes readable when its process has ended, whoever its parent is. For peers on other hosts there is no such
proof: they are given up by deadlines and revoked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
from pathlib import Path

from pdserve.types import Incarnation
from transport.fabric.leftovers import remove_leftovers

_log = logging.getLogger(__name__)


def host_identity() -> str:
    """Equal for processes that share memory and process ids: boot, pid namespace, and which /dev/shm they see.

    Containers may share the ids and not the memory. That their network namespaces differ parts nobody here.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return f"{boot.read_text().strip()}:{os.readlink('/proc/self/ns/pid')}:shm:[{os.stat('/dev/shm').st_dev}]"
    return socket.gethostname()


class PeerWatch:
    """Watches processes of this host by pidfd. Not thread-safe: one owner."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._by_fd: dict[int, Incarnation] = {}
        self._pids: dict[Incarnation, int] = {}
        self._gone: set[Incarnation] = set()

    def add(self, incarnation: Incarnation, pid: int) -> None:
        """Watches `pid`; one that has ended already is reported by the next `ended()`. One that is watched stays so.

        Where the system has no pidfd, there is no proof to be had: deadlines do it, as for another host.
        """
        if incarnation in self._pids:
            return
        self._pids[incarnation] = pid
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone.add(incarnation)
        except OSError as error:
            _log.warning("cannot watch process %d (%s): its end will be noticed by deadlines only", pid, error)
        else:
            self._by_fd[fd] = incarnation
            self._poll.register(fd, select.POLLIN)

    def remove(self, incarnation: Incarnation) -> None:
        self._gone.discard(incarnation)
        self._pids.pop(incarnation, None)
        for fd in [fd for fd, who in self._by_fd.items() if who == incarnation]:
            self._poll.unregister(fd)
            os.close(fd)
            del self._by_fd[fd]

    def ended(self) -> list[Incarnation]:
        """Those whose process has ended since they were added; each is reported once.

        What its transports have left in /dev/shm is removed.
        """
        gone = list(self._gone)
        if self._by_fd:
            gone += [self._by_fd[fd] for fd, _ in self._poll.poll(0)]
        for incarnation in gone:
            with contextlib.suppress(ValueError, OSError):
                remove_leftovers(self._pids[incarnation])
            self.remove(incarnation)
        return gone

    def close(self) -> None:
        for incarnation in list(self._by_fd.values()):
            self.remove(incarnation)
