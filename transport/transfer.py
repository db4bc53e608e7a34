"""What a submitted write becomes: an order (checked numbers), a transfer (its progress) and the parts it is dealt into.

No provider in here.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from transport.api import Imm, Memory, OnDone, PagedWrite, RegionDescriptor, SingleWrite
from transport.descriptors import check_descriptor
from transport.errors import RegionBusy, TransferCancelled

_ZERO = np.zeros(1, np.int64)
UNREGISTERED = "the source region was unregistered: register the memory again before writing from it"
_tickets = itertools.count(1)
_waiting_lock = threading.Lock()
"""An event for each transfer would cost more than the rest of it; most are never waited for."""


class Source(Protocol):
    """What an order needs of a source region."""

    @property
    def memory(self) -> Memory: ...

    @property
    def users(self) -> set[TransferState]: ...

    retired: bool
    """It was unregistered: nothing may read from it any more."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Writes as numbers: block i goes from source + source_stride·source_index[i] to target + … under `key`.

    `source` is an address; `target` is what the provider wants: an offset or a virtual address. `keys` has one key for
    each NIC of the peer. The last block is `last_bytes` long where a range was cut into unequal parts.
    """

    region: Source | None
    block_bytes: int
    source: int
    source_stride: int
    source_index: NDArray[np.int64]
    target: int
    target_stride: int
    target_index: NDArray[np.int64]
    keys: tuple[bytes, ...]
    imm: Imm
    last_bytes: int

    def bytes_of(self, start: int, stop: int) -> int:
        """Payload of the blocks `start:stop`."""
        short = self.block_bytes - self.last_bytes if stop == len(self.source_index) and stop > start else 0
        return (stop - start) * self.block_bytes - short


def paged_order(write: PagedWrite, provider: str) -> Order:
    """Raises ValueError if a block lies outside of its region, DescriptorMismatch."""
    check_descriptor(write.target, provider)
    if write.block_bytes <= 0:
        raise ValueError(f"block_bytes must be positive, not {write.block_bytes}")
    # Copies: the caller may go on with its arrays, and the loops take nothing but contiguous, writable ones.
    source_index = np.array(write.source_index, np.int64, order="C")
    target_index = np.array(write.target_index, np.int64, order="C")
    if source_index.ndim != 1 or source_index.shape != target_index.shape:
        raise ValueError(f"index arrays must be 1-d and alike, not {source_index.shape} and {target_index.shape}")
    memory = write.source.memory
    _check("source", write.source_offset, write.source_stride, source_index, write.block_bytes, memory.length_bytes)
    _check(
        "target", write.target_offset, write.target_stride, target_index, write.block_bytes, write.target.length_bytes
    )
    return Order(
        _as_source(write.source), write.block_bytes,
        memory.address + write.source_offset, write.source_stride, source_index,
        write.target.base + write.target_offset, write.target_stride, target_index,
        write.target.keys, _checked_imm(write.imm), write.block_bytes,
    )  # fmt: skip


def single_order(write: SingleWrite, provider: str) -> Order:
    """Raises ValueError if it lies outside of its region, DescriptorMismatch."""
    check_descriptor(write.target, provider)
    if write.length_bytes <= 0:
        raise ValueError(f"length_bytes must be positive, not {write.length_bytes}; for no payload use immediate()")
    if not 1 <= write.parts <= write.length_bytes:
        raise ValueError(f"parts must be from 1 to length_bytes ({write.length_bytes}), not {write.parts}")
    memory = write.source.memory
    _check("source", write.source_offset, 0, _ZERO, write.length_bytes, memory.length_bytes)
    _check("target", write.target_offset, 0, _ZERO, write.length_bytes, write.target.length_bytes)
    block = -(-write.length_bytes // write.parts)
    parts = -(-write.length_bytes // block)
    if parts != write.parts:
        raise ValueError(f"{write.length_bytes} bytes cannot be cut into {write.parts} parts of about equal length")
    index = _ZERO if parts == 1 else np.arange(parts, dtype=np.int64)
    return Order(
        _as_source(write.source), block, memory.address + write.source_offset, block, index,
        write.target.base + write.target_offset, block, index, write.target.keys, _checked_imm(write.imm),
        write.length_bytes - (parts - 1) * block,
    )  # fmt: skip


def immediate_order(target: RegionDescriptor, imm: Imm, provider: str) -> Order:
    check_descriptor(target, provider)
    return Order(None, 0, 0, 0, _ZERO, target.base, 0, _ZERO, target.keys, _checked_imm(imm), 0)


def _checked_imm(imm: Imm) -> Imm:
    if not 0 <= imm < 1 << 32:
        raise ValueError(f"immediate {imm} does not fit 32 bits")
    return imm


def _as_source(region: object) -> Source:
    if not hasattr(region, "users"):
        raise TypeError(f"{type(region).__name__} was not made by Transport.register")
    if getattr(region, "retired", False):
        raise ValueError(UNREGISTERED)
    return region  # type: ignore[return-value]


def retire(region: Source) -> None:
    """On the worker: nothing is posted from it any more. Raises RegionBusy, naming the transfers that read from it."""
    users = sorted(map(str, list(region.users)))
    if users:
        raise RegionBusy(f"the region is still read by {', '.join(users)}: wait for them or close their link")
    region.retired = True


def _check(side: str, offset: int, stride: int, index: NDArray[np.int64], block: int, length: int) -> None:
    if not len(index):
        return
    ends = (offset + stride * int(index.min()), offset + stride * int(index.max()))
    if min(ends) < 0 or max(ends) + block > length:
        raise ValueError(
            f"{side} blocks reach from byte {min(ends)} to {max(ends) + block}, outside of its region of {length} bytes"
        )


class Part:
    """A contiguous range of a transfer's blocks that one path carries. Written by the worker alone.

    Blocks `start:at` were posted, `at:stop` were not; all of them are `block_bytes` long.
    """

    __slots__ = ("at", "block_bytes", "ended", "path", "start", "stop", "ticket", "transfer")

    def __init__(self, transfer: TransferState, start: int, stop: int, block_bytes: int) -> None:
        self.transfer, self.start, self.at, self.stop = transfer, start, start, stop
        self.block_bytes = block_bytes
        self.ticket = next(_tickets)
        self.path: Path | None = None
        self.ended = 0
        """Writes of it that have completed or failed."""

    @property
    def in_flight(self) -> int:
        return self.at - self.start - self.ended


class Path(Protocol):
    """One pair of NICs, as far as a part needs to know it."""

    in_flight: int


class TransferState:
    """Implements `transport.api.Transfer`. The counts are written by the worker alone."""

    __slots__ = (
        "__weakref__", "_cancel", "_waiting", "completed", "done", "error", "failed", "finished_at", "number",
        "on_done", "order", "peer", "posted", "stopped", "total",
    )  # fmt: skip

    def __init__(
        self, order: Order, on_done: OnDone | None, peer: str, cancel: Callable[[TransferState], None]
    ) -> None:
        self.order, self.on_done, self.peer = order, on_done, peer
        self.number = next(_tickets)
        self.total = len(order.source_index)
        self.posted = 0
        self.completed = 0
        self.failed = 0
        self.error: Exception | None = None
        self.finished_at: float | None = None
        self.stopped = False
        self.done = False
        self._cancel = cancel
        self._waiting: threading.Event | None = None
        if order.region is not None:
            order.region.users.add(self)

    @property
    def in_flight(self) -> int:
        return self.posted - self.completed - self.failed

    def cancel(self) -> None:
        if not self.done:
            self._cancel(self)

    def wait(self, timeout_s: float | None = None) -> bool:
        if self.done:
            return True
        with _waiting_lock:
            if self._waiting is None:
                self._waiting = threading.Event()
        return self.done or self._waiting.wait(timeout_s)

    def stop(self, error: Exception) -> None:
        """Nothing more will be posted; `error` stands unless an earlier one does or everything completes."""
        self.stopped = True
        self.error = self.error or error

    def cancelled(self) -> TransferCancelled:
        return TransferCancelled(f"{self} was cancelled after {self.posted} of {self.total} writes")

    def finish(self) -> None:
        """Marks it done, for good. The caller calls `on_done` afterwards."""
        assert not self.done
        if self.order.region is not None:
            self.order.region.users.discard(self)
        if self.completed == self.total:
            self.error = None
        self.finished_at = time.monotonic()
        self.done = True
        with _waiting_lock:  # who waits has seen `done`, or its event is seen here
            waiting = self._waiting
        if waiting is not None:
            waiting.set()

    def __str__(self) -> str:
        towards = f" to {self.peer}" if self.peer else ""
        return f"transfer {self.number}{towards}"
