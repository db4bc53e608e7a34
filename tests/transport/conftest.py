from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from transport.api import Imm, Link, Memory, PagedWrite, RegionDescriptor, Transfer, Transport
from transport.engine import TransferEngine
from transport.errors import LibraryMissing, ProviderUnavailable
from transport.loopback import LoopbackNet, LoopbackTransport

TIMEOUT_S = 20.0
_PEER = Path(__file__).with_name("peer_process.py")

Opener = Callable[[], Transport]


def _engine(provider: str, calls: str = "auto") -> Opener:
    def opened() -> Transport:
        try:
            return TransferEngine(provider, calls=calls, stall_timeout_s=2.0)  # type: ignore[arg-type]
        except (LibraryMissing, ProviderUnavailable) as error:
            pytest.skip(str(error))

    return opened


OPENERS: dict[str, Callable[[], Opener]] = {
    "tcp": lambda: _engine("tcp"),
    "tcp-ctypes": lambda: _engine("tcp", "ctypes"),
    "shm": lambda: _engine("shm"),
    "shm-ctypes": lambda: _engine("shm", "ctypes"),
    "sockets": lambda: _engine("sockets"),
    "rxm": lambda: _engine("tcp;ofi_rxm"),
    "loopback": lambda: (lambda net: lambda: LoopbackTransport(net))(LoopbackNet()),
    "loopback-shuffled": lambda: (
        lambda net: lambda: LoopbackTransport(net, seed=7, delay_s=(0.0, 0.002))
    )(LoopbackNet()),
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

    def __init__(self, opener: Opener, blocks: int = 64, block_bytes: int = 4096, window: int = 16) -> None:
        self.blocks, self.block_bytes = blocks, block_bytes
        self.sender, self.receiver = opener(), opener()
        self.source_bytes = np.random.default_rng(0).integers(1, 255, (blocks, block_bytes), dtype=np.uint8)
        self.target_bytes = np.zeros((blocks, block_bytes), np.uint8)
        self.source = self.sender.register(memory_of(self.source_bytes))
        self.link, self.remote = self.connect(window)
        self.target = self.remote.expose(memory_of(self.target_bytes)).descriptor

    def connect(self, window: int = 16) -> tuple[Link, Link]:
        link, remote = self.sender.open_link(), self.receiver.open_link()
        link.connect(remote.address, window=window, name="receiver")
        return link, remote

    def paged(
        self, imm: Imm, index: NDArray[np.int64] | None = None, target: RegionDescriptor | None = None, **kwargs: Any
    ) -> Transfer:
        order = np.arange(self.blocks) if index is None else index
        write = PagedWrite(
            self.source, target or self.target, self.block_bytes, 0, self.block_bytes, order, 0, self.block_bytes, order, imm
        )  # fmt: skip
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

    def ask(self, command: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump((command, arguments), self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        code = self._process.wait(TIMEOUT_S)
        self._process.stdout.close()
        return code


@pytest.fixture
def peers() -> Iterator[Callable[[], PeerProcess]]:
    started: list[PeerProcess] = []

    def start() -> PeerProcess:
        started.append(PeerProcess())
        return started[-1]

    yield start
    for peer in started:
        peer.kill()


@pytest.fixture
def full() -> Callable[[], Full]:
    return Full


@pytest.fixture
def open_engine() -> Callable[..., Opener]:
    return _engine


@pytest.fixture
def memory() -> Callable[[NDArray[Any]], Memory]:
    return memory_of


@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.slow if n == "rxm" else ()) for n in OPENERS])
def opener(request: pytest.FixtureRequest) -> Opener:
    return OPENERS[request.param]()


@pytest.fixture
def make_pair(opener: Opener) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(**kwargs: Any) -> Pair:
        made.append(Pair(opener, **kwargs))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair()
