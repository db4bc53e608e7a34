"""What two doctors say to each other: JSON objects over a TCP socket, each with its length before it.

Nothing that comes from the network is executed, and nothing longer than MAX_BYTES is read.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

MAX_BYTES = 1 << 20
POLL_S = 0.05
_LENGTH = struct.Struct("!I")


class PeerFailed(Exception):
    """The transfer test cannot go on: what was found, and what to do."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(found)
        self.found, self.advice = found, advice


class NotADoctor(PeerFailed):
    """Whoever connected does not speak this protocol."""


class Conversation:
    """One side of it. Used by one thread. `timeout_s` bounds every wait for the other side."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._socket = connection
        self._timeout_s = timeout_s
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def local_address(self) -> str:
        return _plain(self._socket.getsockname()[0])

    @property
    def peer_address(self) -> str:
        return _plain(self._socket.getpeername()[0])

    def say(self, kind: str, **fields: Any) -> None:
        """Raises PeerFailed."""
        body = json.dumps({"kind": kind, **fields}).encode()
        try:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise self._gone(error) from error

    def hear(self, kind: str) -> dict[str, Any]:
        """The next message, which must be of this kind. Raises PeerFailed, also with what the other side reports."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MAX_BYTES:
            raise NotADoctor("what was received is no message of pdserve doctor", _NOT_OURS)
        try:
            message = json.loads(self._read(length))
        except ValueError as error:
            raise NotADoctor("what was received is no message of pdserve doctor", _NOT_OURS) from error
        if not isinstance(message, dict):
            raise NotADoctor("what was received is no message of pdserve doctor", _NOT_OURS)
        if message.get("kind") == "failed":
            raise PeerFailed(f"the other side reports: {message.get('found')}", str(message.get("advice")))
        if message.get("kind") != kind:
            raise PeerFailed(f"the other side said {message.get('kind')!r} where {kind!r} was expected", SAME_VERSION)
        return message

    def until(self, wait: Callable[[float], bool], what: Callable[[], str]) -> None:
        """Waits for something here while listening for the other side's failure. Raises PeerFailed."""
        deadline = time.monotonic() + self._timeout_s
        while not wait(POLL_S):
            if time.monotonic() > deadline:
                raise PeerFailed(f"{what()} within {self._timeout_s:g} s", _BLOCKED)
            if select.select([self._socket], [], [], 0)[0]:
                self._check_still_there()

    def tell_failure(self, failure: PeerFailed) -> None:
        """As far as the other side still listens."""
        with contextlib.suppress(PeerFailed):
            self.say("failed", found=failure.found, advice=failure.advice)

    def close(self) -> None:
        self._socket.close()

    def _check_still_there(self) -> None:
        """What has come is either a failure or the next message, which may wait."""
        try:
            head = self._socket.recv(64, socket.MSG_PEEK)
        except OSError as error:
            raise self._gone(error) from error
        if not head:
            raise self._gone(None)
        if b'{"kind": "failed"' in head:
            self.hear("")

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            try:
                part = self._socket.recv(length - len(data))
            except TimeoutError as error:
                raise PeerFailed(f"the other side said nothing for {self._timeout_s:g} s", _BLOCKED) from error
            except OSError as error:
                raise self._gone(error) from error
            if not part:
                raise self._gone(None)
            data += part
        return bytes(data)

    def _gone(self, error: OSError | None) -> PeerFailed:
        why = f": {error.strerror or error}" if error else ""
        return PeerFailed(
            f"the other side closed the connection{why}", "see what its doctor printed, and start both again"
        )


_NOT_OURS = "the port belongs to another program: choose another one with --listen PORT and --peer HOST:PORT"
SAME_VERSION = "run the same version of pdserve on both sides"
_BLOCKED = "a firewall or security group that lets the provider's ports through? Try --provider tcp to compare"


def _plain(address: str) -> str:
    """IPv4 as IPv4 on a socket that takes both."""
    return address.removeprefix("::ffff:")
