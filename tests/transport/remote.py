"""Another process with a transport, driven from here: for receivers that cannot live in this one, and to be killed."""

from __future__ import annotations

import atexit
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transport.api import Imm, LinkAddress, Memory, OnMessage, SingleWrite
from transport.inbox import guarded

TIMEOUT_S = 20.0
_PEER = Path(__file__).with_name("peer_process.py")
_POLL_S = 0.002


class PeerProcess:
    """A process that runs peer_process.py and answers pickled commands."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_PEER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_PEER.parents[2],
        )
        self._lock = threading.Lock()

    def ask(self, command: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            pickle.dump((command, arguments), self._process.stdin)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    @property
    def pid(self) -> int:
        return self._process.pid

    def shut(self) -> bool:
        """Ends what it does for a test; False if it cannot go on to the next."""
        if self._process.poll() is not None:
            return False
        try:
            self.ask("shut")
        except Exception:
            return False
        return True

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def close(self) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        code = self._process.wait(TIMEOUT_S)
        self._process.stdout.close()
        return code


class RemoteTransport:
    """A transport in another process, as far as the tests of a receiver need one."""

    _peer: PeerProcess | None = None

    def __init__(self, provider: str, options: dict[str, Any]) -> None:
        self.peer = self._shared_peer()
        self.peer.ask("open", provider, options)
        self.immediates = RemoteImmediates(self.peer)
        self._shared: dict[int, int] = {}
        self._open = True

    @classmethod
    def _shared_peer(cls) -> PeerProcess:
        """One process for all tests, with a transport of its own for each: starting one takes a second."""
        if cls._peer is None:
            cls._peer = PeerProcess()
            atexit.register(cls._peer.close)
        return cls._peer

    @property
    def revokes(self) -> bool:
        return bool(self.peer.ask("of_transport", "revokes"))

    @property
    def incarnation(self) -> int:
        return int(self.peer.ask("of_transport", "incarnation"))

    def shared(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="pdserve-test-") as file:
            file.truncate(int(np.prod(shape)))
            array = np.memmap(file.name, np.uint8, "r+", shape=shape)
            handle = self.peer.ask("map_shared", file.name)
        self._shared[int(array.ctypes.data)] = handle
        return array

    def open_link(self, on_message: OnMessage | None = None) -> RemoteLink:
        link = RemoteLink(self, *self.peer.ask("open_link"))
        if on_message is not None:
            link.follow(on_message)
        return link

    def register(self, memory: Memory) -> int:
        return int(self.peer.ask("register", self._shared[memory.address]))

    def shared_handle(self, memory: Memory) -> int:
        return self._shared[memory.address]

    def stats(self) -> dict[str, int]:
        return dict(self.peer.ask("stats"))

    @property
    def is_open(self) -> bool:
        return self._open

    def close(self) -> None:
        if self._open:
            self._open = False
            self.immediates.closed = True
            self.peer.ask("shut")


class RemoteLink:
    """`write` returns nothing: what became of it shows on the other side, and in `in_flight`, `posted` and `error`."""

    def __init__(self, transport: RemoteTransport, handle: int, address: LinkAddress) -> None:
        self._transport, self._handle, self.address = transport, handle, address

    @property
    def in_flight(self) -> int:
        return int(self._of("in_flight"))

    @property
    def posted(self) -> int:
        return int(self._of("posted"))

    @property
    def error(self) -> Exception | None:
        return self._of("error")  # type: ignore[no-any-return]

    def expose(self, memory: Memory) -> Any:
        shared = self._transport.shared_handle(memory)
        return SimpleNamespace(descriptor=self._transport.peer.ask("expose_shared", self._handle, shared))

    def connect(self, address: LinkAddress, window: int, name: str = "") -> None:
        self._transport.peer.ask("connect", self._handle, address, window, name)

    def write(self, write: SingleWrite) -> None:
        self._transport.peer.ask("write", self._handle, write)

    def send(self, message: bytes) -> None:
        self._transport.peer.ask("send", self._handle, message)

    def quiesce(self, timeout_s: float | None = None) -> int:
        return int(self._transport.peer.ask("quiesce", self._handle, timeout_s))

    def close(self) -> None:
        self._transport.peer.ask("close_link", self._handle)

    def follow(self, on_message: OnMessage) -> None:
        """Calls it here with what comes there."""

        def run() -> None:
            while self._transport.is_open:
                try:
                    messages = self._transport.peer.ask("messages", self._handle)
                except Exception:  # the process has gone, or has begun another test
                    return
                for message in messages:
                    guarded(on_message, message)
                time.sleep(_POLL_S)

        threading.Thread(target=run, name="transport-remote", daemon=True).start()

    def _of(self, name: str) -> Any:
        return self._transport.peer.ask("of_link", self._handle, name)


class RemoteImmediates:
    def __init__(self, peer: PeerProcess) -> None:
        self._peer = peer
        self.closed = False

    def arm(self, imm: Imm, expected: int, on_full: Callable[[Imm], None]) -> None:
        self._follow(self._peer.ask("arm", imm, expected), imm, on_full)

    def retarget(self, imm: Imm, expected: int, on_full: Callable[[Imm], None]) -> None:
        self._follow(self._peer.ask("retarget", imm, expected), imm, on_full)

    def _follow(self, handle: int, imm: Imm, on_full: Callable[[Imm], None]) -> None:
        def run() -> None:
            while not self.closed:
                if self._peer.ask("fired", handle):
                    guarded(on_full, imm)
                    return
                time.sleep(_POLL_S)

        threading.Thread(target=run, name="transport-remote", daemon=True).start()

    def received(self, imm: Imm) -> int:
        return int(self._peer.ask("received", imm))

    def disarm(self, imm: Imm) -> int:
        return int(self._peer.ask("disarm", imm))

    @property
    def late(self) -> int:
        return int(self._peer.ask("late"))

    @property
    def overflow(self) -> int:
        return int(self._peer.ask("overflow"))
