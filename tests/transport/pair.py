"""A sender and a receiver that are connected, and what tests wait with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.transport.remote import RemoteTransport
from transport.api import Imm, Memory, PagedWrite, RegionDescriptor, Transfer

TIMEOUT_S = 20.0

Opener = Callable[[], Any]


def eventually(condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not come to be in time"
        time.sleep(0.001)


def memory_of(array: NDArray[Any]) -> Memory:
    return Memory(int(array.ctypes.data), array.nbytes)


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
    """A sender and a receiver, connected, with `blocks` blocks of `block_bytes` on either side.

    `there` and `here` are the messages that came to the receiver and to the sender.
    """

    def __init__(
        self,
        openers: tuple[Opener, Opener],
        blocks: int = 64,
        block_bytes: int = 4096,
        window: int = 16,
        window_back: int = 0,
    ) -> None:
        self.blocks, self.block_bytes = blocks, block_bytes
        self.here: list[bytes] = []
        self.there: list[bytes] = []
        self.sender = openers[0]()
        try:
            self.receiver = openers[1]()
        except BaseException:
            self.sender.close()
            raise
        self.source_bytes = np.random.default_rng(0).integers(1, 255, (blocks, block_bytes), dtype=np.uint8)
        self.target_bytes = self.new_target()
        self.source = self.sender.register(memory_of(self.source_bytes))
        self.link, self.remote = self.connect(window, window_back)
        self.target = self.remote.expose(memory_of(self.target_bytes)).descriptor

    def new_target(self) -> NDArray[np.uint8]:
        """Memory of the receiver that this process sees."""
        shape = (self.blocks, self.block_bytes)
        return self.receiver.shared(shape) if isinstance(self.receiver, RemoteTransport) else np.zeros(shape, np.uint8)

    def connect(self, window: int = 16, window_back: int = 0) -> tuple[Any, Any]:
        """One more pair of links, for writes there and for messages both ways."""
        link, remote = self.sender.open_link(self.here.append), self.receiver.open_link(self.there.append)
        link.connect(remote.address, window=window, name="receiver")
        remote.connect(link.address, window=window_back, name="sender")
        return link, remote

    def paged(
        self, imm: Imm, index: NDArray[np.int64] | None = None, target: RegionDescriptor | None = None, **kwargs: Any
    ) -> Transfer:
        order = np.arange(self.blocks) if index is None else index
        size = self.block_bytes
        write = PagedWrite(self.source, target or self.target, size, 0, size, order, 0, size, order, imm)
        transfer: Transfer = self.link.write_paged(write, **kwargs)
        return transfer

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
