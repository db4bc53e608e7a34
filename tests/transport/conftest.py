from __future__ import annotations

import atexit
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from transport.api import Imm, LinkAddress, Memory, PagedWrite, RegionDescriptor, SingleWrite, Transfer, Transport
from transport.engine import TransferEngine
from transport.errors import LibraryMissing, ProviderUnavailable
from transport.fabric.leftovers import remove_leftovers
from transport.inbox import guarded
from transport.loopback import LoopbackNet, LoopbackTransport

TIMEOUT_S = 20.0
_PEER = Path(__file__).with_name("peer_process.py")

Opener = Callable[[], Any]


def _engine(provider: str, calls: str = "auto") -> Opener:
    def opened() -> Transport:
        try:
            return TransferEngine(provider, calls=calls, stall_timeout_s=2.0)  # type: ignore[arg-type]
        except (LibraryMissing, ProviderUnavailable) as error:
            pytest.skip(str(error))

    return opened


def _loopback(**kwargs: Any) -> tuple[Opener, Opener]:
    net = LoopbackNet()
    return lambda: LoopbackTransport(net, **kwargs), lambda: LoopbackTransport(net)


def _alone(provider: str, calls: str = "auto") -> tuple[Opener, Opener]:
    return _engine(provider, calls), _engine(provider, calls)


def _apart(provider: str, calls: str = "auto") -> tuple[Opener, Opener]:
    """The receiver is another process: shm does not connect a process with itself."""
    return _engine(provider, calls), lambda: RemoteTransport(provider, calls)


OPENERS: dict[str, Callable[[], tuple[Opener, Opener]]] = {
    "tcp": lambda: _alone("tcp"),
    "tcp-ctypes": lambda: _alone("tcp", "ctypes"),
    "shm": lambda: _apart("shm"),
    "shm-ctypes": lambda: _apart("shm", "ctypes"),
    "sockets": lambda: _alone("sockets"),
    "rxm": lambda: _alone("tcp;ofi_rxm"),
    "loopback": lambda: _loopback(),
    "loopback-shuffled": lambda: _loopback(seed=7, delay_s=(0.0, 0.002)),
}


class Full:
    """An `on_full` that can be waited for."""

    def __init__(self) -> None:
        self.calls: list[Imm] = []
        self.threads: list[str] = []
        self._event = threading.Event()

    def __call__(self, imm: Imm) -> None:
        self.calls.append(imm)
        self.threads.append(threading.current_thread().name)
        self._event.set()

    def wait(self, timeout_s: float = TIMEOUT_S) -> bool:
        return self._event.wait(timeout_s)


class Pair:
    """A sender and a receiver, connected, with `blocks` blocks of `block_bytes` on either side."""

    def __init__(
        self, openers: tuple[Opener, Opener], blocks: int = 64, block_bytes: int = 4096, window: int = 16
    ) -> None:
        self.blocks, self.block_bytes = blocks, block_bytes
        self.sender, self.receiver = openers[0](), openers[1]()
        self.source_bytes = np.random.default_rng(0).integers(1, 255, (blocks, block_bytes), dtype=np.uint8)
        self.target_bytes = self.new_target()
        self.source = self.sender.register(memory_of(self.source_bytes))
        self.link, self.remote = self.connect(window)
        self.target = self.remote.expose(memory_of(self.target_bytes)).descriptor

    def new_target(self) -> NDArray[np.uint8]:
        """Memory of the receiver that this process sees."""
        shape = (self.blocks, self.block_bytes)
        return self.receiver.shared(shape) if isinstance(self.receiver, RemoteTransport) else np.zeros(shape, np.uint8)

    def connect(self, window: int = 16) -> tuple[Any, Any]:
        link, remote = self.sender.open_link(), self.receiver.open_link()
        link.connect(remote.address, window=window, name="receiver")
        return link, remote

    def paged(
        self, imm: Imm, index: NDArray[np.int64] | None = None, target: RegionDescriptor | None = None, **kwargs: Any
    ) -> Transfer:
        order = np.arange(self.blocks) if index is None else index
        size = self.block_bytes
        write = PagedWrite(self.source, target or self.target, size, 0, size, order, 0, size, order, imm)
        return self.link.write_paged(write, **kwargs)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def memory_of(array: NDArray[Any]) -> Memory:
    return Memory(int(array.ctypes.data), array.nbytes)


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

    def __init__(self, provider: str, calls: str) -> None:
        self.peer = self._shared_peer()
        self.peer.ask("open", provider, calls)
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

    def shared(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="pdserve-test-") as file:
            file.truncate(int(np.prod(shape)))
            array = np.memmap(file.name, np.uint8, "r+", shape=shape)
            handle = self.peer.ask("map_shared", file.name)
        self._shared[int(array.ctypes.data)] = handle
        return array

    def open_link(self) -> RemoteLink:
        return RemoteLink(self, *self.peer.ask("open_link"))

    def register(self, memory: Memory) -> int:
        return int(self.peer.ask("register", self._shared[memory.address]))

    def stats(self) -> dict[str, int]:
        return dict(self.peer.ask("stats"))

    def close(self) -> None:
        if self._open:
            self._open = False
            self.immediates.closed = True
            self.peer.ask("shut")


class RemoteLink:
    def __init__(self, transport: RemoteTransport, handle: int, address: LinkAddress) -> None:
        self._transport, self._handle, self.address = transport, handle, address

    def expose(self, memory: Memory) -> Any:
        shared = self._transport._shared[memory.address]
        return SimpleNamespace(descriptor=self._transport.peer.ask("expose_shared", self._handle, shared))

    def connect(self, address: LinkAddress, window: int, name: str = "") -> None:
        self._transport.peer.ask("connect", self._handle, address, window, name)

    def write(self, write: SingleWrite) -> None:
        self._transport.peer.ask("write", self._handle, write)

    def close(self) -> None:
        self._transport.peer.ask("close_link", self._handle)


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
                time.sleep(0.002)

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


_idle: list[PeerProcess] = []
"""Processes that a test is done with and has not killed: starting one takes seconds where the cores are busy."""


@atexit.register
def _close_idle() -> None:
    for peer in _idle:
        peer.close()


@pytest.fixture
def peers() -> Iterator[Callable[[], PeerProcess]]:
    started: list[PeerProcess] = []

    def start() -> PeerProcess:
        started.append(_idle.pop() if _idle else PeerProcess())
        return started[-1]

    yield start
    for peer in started:
        if peer.shut():
            _idle.append(peer)
        else:
            peer.kill()
            remove_leftovers(peer.pid)


@pytest.fixture
def full() -> Callable[[], Full]:
    return Full


@pytest.fixture
def open_engine() -> Callable[..., Opener]:
    return _engine


@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.slow if n == "rxm" else ()) for n in OPENERS])
def openers(request: pytest.FixtureRequest) -> tuple[Opener, Opener]:
    return OPENERS[request.param]()


@pytest.fixture
def make_pair(openers: tuple[Opener, Opener]) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(**kwargs: Any) -> Pair:
        made.append(Pair(openers, **kwargs))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair()
