"""The transfer itself, seen from one side: memory, a link, counters. It knows nothing of the conversation around it."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from typing import Self

import numpy as np

from transport.api import Imm, LinkAddress, Memory, PagedWrite, RegionDescriptor, Transfer, Transport, make_imm

BLOCKS, BLOCK_BYTES = 64, 64 << 10
TOTAL_BYTES = BLOCKS * BLOCK_BYTES
ROUNDS = 16
"""Timed ones, after the first that warms up and is verified."""
PINGS = 200
WINDOW = 128
_VERIFIED, _TIMED, *_PINGS = (make_imm(1 + slot, 1) for slot in range(2 + PINGS))


class Exchange:
    """Two of them, connected, write into each other's memory. Closing it closes the transport too.

    Wait functions take seconds and return whether it has come; `arrived` and the like are set by the worker thread.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        random = np.random.default_rng()
        self._source = random.integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8)
        self._target = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        self._from, self._to = random.permutation(BLOCKS), random.permutation(BLOCKS)
        try:
            self._region = transport.register(_memory(self._source))
            self._link = transport.open_link()
            self._own = self._link.expose(_memory(self._target)).descriptor
            self._arrived = {imm: threading.Event() for imm in (_VERIFIED, _TIMED)}
            for imm, rounds in ((_VERIFIED, 1), (_TIMED, ROUNDS)):
                transport.immediates.arm(imm, rounds * BLOCKS, lambda imm: self._arrived[imm].set())
        except BaseException:
            transport.close()
            raise

    @property
    def description(self) -> str:
        return self._transport.description

    @property
    def card(self) -> tuple[bytes, bytes]:
        """What the other side must know: address and descriptor."""
        return self._link.address.to_bytes(), self._own.to_bytes()

    def connect(self, address: bytes, descriptor: bytes, name: str) -> None:
        """Raises DescriptorMismatch and what else `Link.connect` raises. `name` is for errors."""
        self._peer = RegionDescriptor.from_bytes(descriptor)
        window = min(WINDOW, self._transport.max_window)
        self._link.connect(LinkAddress.from_bytes(address), window=window, name=name)

    def write_verified(self) -> Transfer:
        return self._write(_VERIFIED)

    def write_timed(self) -> list[Transfer]:
        return [self._write(_TIMED) for _ in range(ROUNDS)]

    def wait_verified(self, timeout_s: float) -> bool:
        return self._arrived[_VERIFIED].wait(timeout_s)

    def wait_timed(self, timeout_s: float) -> bool:
        return self._arrived[_TIMED].wait(timeout_s)

    def progress(self) -> str:
        """How far the peer's writes have come, for an error."""
        received = sum(self._transport.immediates.received(imm) for imm in (_VERIFIED, _TIMED))
        broken = f" ({self._link.error})" if self._link.error else ""
        return f"{received} of the peer's {(1 + ROUNDS) * BLOCKS} blocks arrived{broken}"

    def sent_sha256(self) -> str:
        """Of what the peer's memory must hold after a round."""
        image = np.empty_like(self._source)
        image[self._to] = self._source[self._from]
        return hashlib.sha256(image.data).hexdigest()

    def received_sha256(self) -> str:
        return hashlib.sha256(self._target.data).hexdigest()

    def answer_pings(self) -> None:
        """From the worker thread, each by an immediate of the same value."""
        for imm in _PINGS:
            self._transport.immediates.arm(imm, 1, self._pong)

    def ping(self, wait: Callable[[Callable[[float], bool]], None]) -> list[float]:
        """Round trips in seconds, one after another; `wait` gets a wait function and does not return before it is true.

        It includes two passes through each side's worker thread and the wake-up of this one.
        """
        trips = []
        for imm in _PINGS:
            back = threading.Event()
            self._transport.immediates.arm(imm, 1, _setter(back))
            started_s = time.perf_counter()
            self._link.immediate(self._peer, imm)
            wait(back.wait)
            trips.append(time.perf_counter() - started_s)
        return trips

    def close(self) -> None:
        self._link.close()
        self._transport.unregister(self._region)
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pong(self, imm: Imm) -> None:
        self._link.immediate(self._peer, imm)

    def _write(self, imm: Imm) -> Transfer:
        return self._link.write_paged(
            PagedWrite(self._region, self._peer, BLOCK_BYTES, 0, BLOCK_BYTES, self._from, 0, BLOCK_BYTES, self._to, imm)
        )


def _setter(event: threading.Event) -> Callable[[Imm], None]:
    return lambda _: event.set()


def _memory(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Memory:
    return Memory(int(array.ctypes.data), array.nbytes)
