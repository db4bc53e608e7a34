"""A socket that wakes a transport on the same host, for providers whose queues have no file descriptor to wait on.

A sender rings after it has posted; the sleeper has the socket among what it waits for. A ring says nothing but "look":
one that is lost or too many does no harm, because the sleeper looks from time to time anyway.
"""

from __future__ import annotations

import secrets
import socket
import time

RING_INTERVAL_S = 0.0002
"""A bell is rung no more often than this. Who was woken looks often enough for the next so many microseconds."""


class Doorbell:
    """One per transport. `name` goes into the addresses of its links."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.name = b"pdserve-" + secrets.token_hex(8).encode()
        self._socket.bind(b"\0" + self.name)

    def fileno(self) -> int:
        return self._socket.fileno()

    def answer(self) -> None:
        """Takes all rings."""
        try:
            while True:
                self._socket.recv(1)
        except BlockingIOError:
            return

    def close(self) -> None:
        self._socket.close()


class Ringer:
    """Rings the bell of one peer. A peer that has none, or that is on another host, is rung once at most."""

    def __init__(self, name: bytes) -> None:
        self._address = b"\0" + name
        self._next_s = 0.0
        self._socket: socket.socket | None = None
        if name:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)

    @property
    def rings(self) -> bool:
        """Whether there is anything to ring."""
        return self._socket is not None

    def ring(self) -> None:
        if self._socket is None:
            return
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + RING_INTERVAL_S
        try:
            self._socket.sendto(b"\0", self._address)
        except BlockingIOError:
            return  # it has rings that it has not answered yet
        except OSError:
            self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
