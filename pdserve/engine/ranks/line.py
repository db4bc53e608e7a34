"""The socket between a leader and one other rank: messages by kind and length, and file descriptors."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from pdserve.errors import RankLost

_HEAD = struct.Struct("<BI")
_PEER = struct.Struct("<iII")
_DESCRIPTORS = 4
_TROUBLE = {"Z": "has ended", "X": "has ended", "T": "is stopped", "t": "is stopped"}
Key = TypeVar("Key")


class Kind(IntEnum):
    """What a message is; in the order of a rank's life."""

    WHO = 0x51  # rank -> leader: its number
    JOIN = 0x52  # leader -> rank: all are here, join the group
    JOINED = 0x53
    READY = 0x54  # rank -> leader: with the descriptors of its pages and its layer counter
    FAILED = 0x55  # rank -> leader: what it raised, as text; its last message
    STEP = 0x56  # leader -> rank
    LOGITS = 0x57  # a replica's first rank -> leader


@dataclass(frozen=True, slots=True)
class Message:
    """`fds`: descriptors that came along; the receiver owns them."""

    kind: Kind
    data: bytearray
    fds: tuple[int, ...] = ()

    def close_fds(self) -> None:
        for fd in self.fds:
            os.close(fd)

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


class Line:
    """Blocks, without a `timeout_s` for ever. One thread at a time may send; those that receive take turns.

    With a timeout, both raise TimeoutError when the other end has moved no byte for that long; the line is of no use
    any more then.
    """

    def __init__(self, connected: socket.socket, timeout_s: float | None = None) -> None:
        self._socket = connected
        self._turn = threading.Lock()
        self._failure: str | None = None
        peer = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        self.process_id: int = _PEER.unpack(peer)[0]
        self.limit(timeout_s)

    @property
    def trouble(self) -> str | None:
        """Why the other end's process cannot answer, as far as the kernel knows: "has ended", "is stopped"."""
        if self._hung_up():
            return _TROUBLE["Z"]
        try:
            stat = Path(f"/proc/{self.process_id}/stat").read_text()
        except OSError:
            return _TROUBLE["Z"]
        return _TROUBLE.get(stat[stat.rindex(")") + 2])

    def _hung_up(self) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def limit(self, timeout_s: float | None) -> None:
        self._socket.settimeout(timeout_s)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: Kind, data: bytes | memoryview = b"", fds: Sequence[int] = ()) -> None:
        """Raises OSError when the other end is gone."""
        head = _HEAD.pack(kind, len(data))
        sent = socket.send_fds(self._socket, [head, data], fds) if fds else self._socket.sendmsg([head, data])
        if sent < len(head):
            self._socket.sendall(head[sent:])
        rest = max(sent - len(head), 0)
        if rest < len(data):
            self._socket.sendall(memoryview(data)[rest:])

    def receive(self, *, fds: bool = False) -> Message | None:
        """None when the other end is gone. Without `fds`, descriptors that came along are closed.

        Raises RankLost for bytes that are no message.
        """
        with self._turn:
            return self._receive(fds)

    def last_words(self, wait_s: float = 0.0) -> str | None:
        """Why the other end failed, if it has said so. For a line of which nothing else is wanted any more.

        Does not wait for words; for a thread that receives, `wait_s` at most.
        """
        if self._failure is None and self._turn.acquire(timeout=wait_s):
            try:
                while select.select([self._socket], [], [], 0)[0] and self._receive() is not None:
                    pass
            except (OSError, ValueError, RankLost):
                pass
            finally:
                self._turn.release()
        return self._failure

    def _receive(self, wanted: bool = False) -> Message | None:
        fds: tuple[int, ...] = ()
        try:
            head, fds = self._beginning(wanted)
            if not head:
                return None
            kind, length = _HEAD.unpack(head + self._exactly(_HEAD.size - len(head)))
            message = Message(self._kind(kind), self._exactly(length), fds)
        except BaseException as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, (ConnectionError, EOFError)):
                return None
            raise
        if message.kind is Kind.FAILED:
            self._failure = message.text
        return message

    def _beginning(self, wanted: bool) -> tuple[bytes, tuple[int, ...]]:
        """The descriptors lie at a message's first byte; the kernel closes those that nobody asks for."""
        if not wanted:
            return self._socket.recv(_HEAD.size), ()
        head, fds, _, _ = socket.recv_fds(self._socket, _HEAD.size, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        return head, tuple(fds)

    def _kind(self, number: int) -> Kind:
        try:
            return Kind(number)
        except ValueError:
            raise RankLost(f"process {self.process_id} sent what no rank sends (kind {number})") from None

    def _exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            got = self._socket.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return data

    def end(self) -> None:
        """Both ends see that nothing more comes; also while another thread waits."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()


class HangUps:
    """Waits, on a thread of its own, for the first line whose other end is gone. `stop()` wakes it."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._lines = {line.fileno(): line for line in lines}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)

    def wait(self) -> Line | None:
        """None when it was stopped first."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for fd in self._lines:
            poll.register(fd, select.POLLRDHUP)
        ready = [fd for fd, _ in poll.poll()]
        return None if self._wake in ready else self._lines[ready[0]]

    def stop(self) -> None:
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """After its thread has ended."""
        os.close(self._wake)
