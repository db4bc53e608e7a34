"""The transport seam: bytes, one-sided writes and immediates between processes. No tokens, no pages, no models.

The shape of it
---------------
A process has one `Transport`. Towards every peer incarnation it opens one `Link`: an endpoint (and completion queue)
of its own, so that closing the link ends that peer's access, and that peer's alone.

    receiver                                          sender
    --------                                          ------
    link = transport.open_link()                      link = transport.open_link()
    region = link.expose(memory)   --descriptor-->    link.connect(address, window=256)
    transport.immediates.arm(imm, expected, on_full)  source = transport.register(memory)
                                                      link.write_paged(PagedWrite(...))  -> Transfer

Every write delivers its 32-bit immediate into the receiver's completion queue *after* its payload is visible; arrival
order between writes means nothing. A transfer is complete when every write of it has completed locally; a failed one
is complete when nothing of it can be posted any more, and `Transfer.posted` is exact in both cases.

`transport` imports nothing of the project. `TransferEngine` (libfabric) and `LoopbackTransport` implement this
protocol; one conformance suite runs against each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType, Protocol

import numpy as np
from numpy.typing import NDArray

Imm = NewType("Imm", int)
"""The 32-bit immediate: slot in the low 20 bits, generation in the high 12."""

SLOT_BITS = 20
GENERATION_BITS = 12
DESCRIPTOR_VERSION = 1


def make_imm(slot: int, generation: int) -> Imm:
    """Packs a slot and its generation (taken modulo 2**12) into an immediate."""
    if not 0 <= slot < 1 << SLOT_BITS:
        raise ValueError(f"slot {slot} does not fit {SLOT_BITS} bits")
    return Imm((generation % (1 << GENERATION_BITS)) << SLOT_BITS | slot)


def split_imm(imm: int) -> tuple[int, int]:
    """(slot, generation) of an immediate."""
    return imm & ((1 << SLOT_BITS) - 1), imm >> SLOT_BITS


@dataclass(frozen=True, slots=True)
class Memory:
    """A range of this process's address space. The caller keeps it mapped for as long as it is registered."""

    address: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """Where a link can be reached; picklable. `provider` must agree on both sides."""

    version: int
    provider: str
    name: bytes


@dataclass(frozen=True, slots=True)
class RegionDescriptor:
    """What a peer needs to write into a region that was exposed to it; picklable.

    `base` is what remote offsets are added to (0 or a virtual address: the provider's rule, already applied).
    """

    version: int
    provider: str
    base: int
    length_bytes: int
    key: int


@dataclass(frozen=True, slots=True)
class PagedWrite:
    """One write per block, from source_offset + source_stride·source_index[i] to the same expression of the target.

    Offsets and strides in bytes, relative to the start of `source` and `target`; index arrays `(blocks,) int64` of
    equal length. Every block is exactly one write with one immediate; writes are never merged.
    """

    source: SourceRegion
    target: RegionDescriptor
    block_bytes: int
    source_offset: int
    source_stride: int
    source_index: NDArray[np.int64]
    target_offset: int
    target_stride: int
    target_index: NDArray[np.int64]
    imm: Imm


@dataclass(frozen=True, slots=True)
class SingleWrite:
    """One contiguous write with one immediate. Offsets in bytes."""

    source: SourceRegion
    target: RegionDescriptor
    length_bytes: int
    source_offset: int
    target_offset: int
    imm: Imm


class SourceRegion(Protocol):
    """Local memory that writes may read from. Opaque; made by `Transport.register`."""

    @property
    def memory(self) -> Memory: ...


class ExposedRegion(Protocol):
    """Local memory that the peer of one link may write to. Made by `Link.expose`; ends with the link."""

    @property
    def descriptor(self) -> RegionDescriptor: ...


class Transfer(Protocol):
    """A submitted write. Thread-safe."""

    @property
    def total(self) -> int:
        """Number of writes asked for."""
        ...

    @property
    def posted(self) -> int:
        """Number of writes handed to the provider so far; final once `done`. Each may have landed."""
        ...

    @property
    def completed(self) -> int:
        """Number of writes that completed locally without error."""
        ...

    @property
    def done(self) -> bool:
        """True when nothing of this transfer is in flight or will be posted."""
        ...

    @property
    def error(self) -> Exception | None: ...

    @property
    def finished_at(self) -> float | None:
        """`time.monotonic()` of the moment it became done."""
        ...

    def cancel(self) -> None:
        """Posts no further write of it. What is in flight still completes; then it is done."""
        ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until done; False on timeout."""
        ...


OnDone = Callable[[Transfer], None]
"""Called once on the worker thread. It must not block; if it raises, that is logged and isolated."""


class Link(Protocol):
    """This process's endpoint towards one peer incarnation. Thread-safe."""

    @property
    def address(self) -> LinkAddress: ...

    @property
    def in_flight(self) -> int:
        """Writes posted on this link that have not completed."""
        ...

    @property
    def error(self) -> Exception | None:
        """What broke the link; None while nothing has, and closing it is no breakage. It never goes back to None.

        A side that only receives learns from this alone that nothing more will come: it has no transfer to fail.
        A peer that is gone shows here only where the provider reports it: tcp does if that cut off a write half way.
        """
        ...

    def expose(self, memory: Memory) -> ExposedRegion:
        """Lets the peer write into `memory` under a key of its own."""
        ...

    def connect(self, peer: LinkAddress, *, window: int, name: str = "") -> None:
        """Directs this link's writes at `peer`; at most `window` of them outstanding. `name` is used in errors."""
        ...

    def write_paged(self, write: PagedWrite, on_done: OnDone | None = None) -> Transfer: ...

    def write(self, write: SingleWrite, on_done: OnDone | None = None) -> Transfer: ...

    def immediate(self, target: RegionDescriptor, imm: Imm, on_done: OnDone | None = None) -> Transfer:
        """A write of no payload: the immediate alone."""
        ...

    def close(self) -> None:
        """Revokes what was exposed, closes the endpoint, drains its queue.

        On return no byte of the peer can land any more, no immediate of it is counted any more, and every transfer of
        this link is done (with an error unless it had completed). Idempotent.
        """
        ...


class Immediates(Protocol):
    """Counts immediates by slot. Thread-safe. An immediate whose slot is not armed with its generation is `late`."""

    @property
    def late(self) -> int:
        """Immediates that matched no armed counter, so far."""
        ...

    @property
    def overflow(self) -> int:
        """Immediates counted beyond their expected count, so far."""
        ...

    def arm(self, imm: Imm, expected: int, on_full: Callable[[Imm], None]) -> None:
        """Starts counting `imm`; `on_full` is called once on the worker thread (or here, if `expected` is 0)."""
        ...

    def received(self, imm: Imm) -> int:
        """Immediates counted since `imm` was armed. Raises KeyError if it is not armed."""
        ...

    def retarget(self, imm: Imm, expected: int, on_full: Callable[[Imm], None]) -> None:
        """Replaces count and callback of an armed counter, keeping what was received; fires at once if already full."""
        ...

    def disarm(self, imm: Imm) -> int:
        """Stops counting `imm` and returns what was received; later ones count as late."""
        ...


class Transport(Protocol):
    """One per process. Owns a worker thread; `close()` joins it."""

    @property
    def provider(self) -> str: ...

    @property
    def immediates(self) -> Immediates: ...

    @property
    def receiver_pulls(self) -> bool:
        """Whether the receiver's process copies from the sender's memory.

        Then a link that was closed with writes in flight leaves a receiver that may still read their source, until it
        has closed its own side or its process has ended.
        """
        ...

    @property
    def error(self) -> Exception | None:
        """What ended the worker thread; None while it runs and after an orderly close.

        Then all links are closed, all transfers done, and whatever is asked of it raises TransportFailed.
        """
        ...

    @property
    def max_window(self) -> int:
        """Largest sum of windows that this process may grant: its receive queues are that deep."""
        ...

    def register(self, memory: Memory) -> SourceRegion: ...

    def unregister(self, region: SourceRegion) -> None:
        """Raises RegionBusy, naming the transfers, while writes from it are in flight."""
        ...

    def open_link(self) -> Link: ...

    def stats(self) -> dict[str, int]:
        """Counters: writes_posted, writes_completed, writes_failed, bytes_completed, immediates_late, links_open."""
        ...

    def close(self) -> None: ...
