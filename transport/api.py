"""The transport seam: bytes, one-sided writes and immediates between processes. No tokens, no pages, no models.

The shape of it
---------------
A process has one `Transport` per provider, over one or several NICs. Towards every peer incarnation it opens one
`Link`: endpoints (one per NIC, each with a completion queue) of its own, so that closing the link ends that peer's
access, and that peer's alone.

    receiver                                          sender
    --------                                          ------
    link = transport.open_link(on_message)            link = transport.open_link(on_message)
    region = link.expose(memory)     --descriptor-->  link.connect(address, window=256)
    link.connect(address, window=0)  <----address---  source = transport.register(memory)
    transport.immediates.arm(imm, expected, on_full)
                                     <=== writes ===  link.write_paged(PagedWrite(...))  -> Transfer
                                     <-- messages ->  link.send(b"...")

Every write delivers its 32-bit immediate into the receiver's completion queue *after* its payload is visible; arrival
order between writes means nothing. A transfer is complete when every write of it has completed locally; a failed one
is complete when nothing of it can be posted any more, and `Transfer.posted` is exact in both cases.

`transport` imports nothing of the project. `TransferEngine` (libfabric), `UcxTransport` (libucp) and
`LoopbackTransport` implement this protocol; one conformance suite runs against each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from transport.descriptors import DESCRIPTOR_VERSION, HOST, Device, LinkAddress, Memory, RegionDescriptor
from transport.imm import GENERATION_BITS, SLOT_BITS, Imm, make_imm, split_imm
from transport.writes import PagedWrite, SingleWrite, SourceRegion

__all__ = [
    "DESCRIPTOR_VERSION", "GENERATION_BITS", "HOST", "MAX_MESSAGE_BYTES", "SLOT_BITS",
    "Device", "ExposedRegion", "Imm", "Immediates", "Link", "LinkAddress", "Memory", "OnDone", "OnMessage",
    "PagedWrite", "RegionDescriptor", "SingleWrite", "SourceRegion", "Transfer", "Transport", "make_imm", "split_imm",
]  # fmt: skip

MAX_MESSAGE_BYTES = 16 << 20
"""Longest message that `Link.send` takes."""


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

OnMessage = Callable[[bytes], None]
"""Called on the worker thread with one message of the peer. It must not block; if it raises, that is isolated."""


class Link(Protocol):
    """This process's endpoints towards one peer incarnation. Thread-safe."""

    @property
    def address(self) -> LinkAddress: ...

    @property
    def in_flight(self) -> int:
        """Writes posted on this link that have not completed."""
        ...

    @property
    def posted(self) -> int:
        """Writes handed to the provider on this link, in all."""
        ...

    @property
    def error(self) -> Exception | None:
        """What broke the link; None while nothing has, and closing it is no breakage. It never goes back to None.

        A side that only receives learns from this alone that nothing more will come: it has no transfer to fail.
        A peer that is gone shows here only where the provider reports it: tcp does if that cut off a write half way.
        A link over several NICs is broken when the last path of it is.
        """
        ...

    @property
    def lost_paths(self) -> tuple[str, ...]:
        """Pairs of NICs that were taken out after an error, in words; the others go on."""
        ...

    @property
    def revoked(self) -> bool:
        """Whether the peer's access has ended: False before `close`, and if a step of it has failed."""
        ...

    def expose(self, memory: Memory) -> ExposedRegion:
        """Lets the peer write into `memory` under keys of its own, one per NIC."""
        ...

    def connect(self, peer: LinkAddress, *, window: int, name: str = "") -> None:
        """Directs this link at `peer`; at most `window` writes outstanding (0: messages only). `name` is for errors."""
        ...

    def write_paged(self, write: PagedWrite, on_done: OnDone | None = None) -> Transfer: ...

    def write(self, write: SingleWrite, on_done: OnDone | None = None) -> Transfer: ...

    def immediate(self, target: RegionDescriptor, imm: Imm, on_done: OnDone | None = None) -> Transfer:
        """A write of no payload: the immediate alone.

        NICs check no key for it: until the peer has closed its endpoint, it arrives even after a revocation (and is not
        counted), and `verbs;ofi_rxm` (libfabric 2.5) does not survive one that comes while an endpoint closes.
        """
        ...

    def send(self, message: bytes) -> None:
        """A small two-sided message, for control. Both sides must be connected; returns at once.

        Messages of one link arrive in order, each once, or not at all when the link breaks. They are not ordered with
        writes. Raises MessageTooLarge, BacklogFull (the peer takes none), NotConnected, LinkClosed.
        """
        ...

    def quiesce(self, timeout_s: float | None = None) -> int:
        """Waits until nothing is queued or in flight, then returns `posted`. Raises TimeoutError, naming what is."""
        ...

    def close(self) -> None:
        """Revokes what was exposed, closes the endpoints, drains their queues.

        On return no byte of the peer can land any more (where `Transport.revokes`), no immediate or message of it is
        taken any more, and every transfer of this link is done (with an error unless it had completed). Idempotent.
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
    def incarnation(self) -> int:
        """64 random bits, drawn when it was opened; part of every address and descriptor."""
        ...

    @property
    def description(self) -> str:
        """One line a person can read: provider, library, NICs, and why they were chosen."""
        ...

    @property
    def revokes(self) -> bool:
        """Whether `Link.close` keeps its promise that nothing lands afterwards.

        Where not, memory that a link had exposed is safe only once the peer's process is known to have ended.
        """
        ...

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
        """Largest window that may be granted on a link: the receive queues of every link are its own, and that deep."""
        ...

    def register(self, memory: Memory) -> SourceRegion: ...

    def unregister(self, region: SourceRegion) -> None:
        """Raises RegionBusy, naming the transfers, while writes from it are in flight."""
        ...

    def open_link(self, on_message: OnMessage | None = None) -> Link:
        """A link for one peer incarnation; messages that come while `on_message` is None are dropped."""
        ...

    def stats(self) -> dict[str, int]:
        """Counters: writes_posted, writes_completed, writes_failed, bytes_completed, immediates_late, messages_sent,
        messages_received, paths_lost, links_open."""
        ...

    def close(self) -> None: ...
