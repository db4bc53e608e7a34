"""The socket between a leader and one other rank: messages by their length, and file descriptors."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

_LENGTH = struct.Struct("<I")


class Line:
    """Blocks. One thread at a time may send, one may receive."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Raises OSError when the other end is gone. Descriptors go with a message that is not empty."""
        data = _LENGTH.pack(len(message)) + message
        if fds:
            sent = socket.send_fds(self._socket, [data], list(fds))
            data = data[sent:]
        self._socket.sendall(data)

    def receive(self) -> bytes | None:
        """None when the other end is gone."""
        return self.receive_fds(0)[0]

    def receive_fds(self, most: int) -> tuple[bytes | None, list[int]]:
        """A message, and the descriptors that came with it, which the caller owns."""
        fds: list[int] = []
        try:
            if most:
                head, fds, _, _ = socket.recv_fds(self._socket, _LENGTH.size, most)
            else:
                head = self._socket.recv(_LENGTH.size)
            head += self._exactly(_LENGTH.size - len(head)) if head else b""
            return (self._exactly(*_LENGTH.unpack(head)) if head else None), fds
        except (ConnectionError, EOFError):
            return None, fds

    def _exactly(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            got = self._socket.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return bytes(data)

    def end(self) -> None:
        """Both ends see that nothing more comes; also while another thread waits."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()
