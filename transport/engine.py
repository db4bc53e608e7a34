"""`TransferEngine`: the transport over libfabric. What is asked of it is passed to the worker thread."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Self

from transport.api import (
    DESCRIPTOR_VERSION,
    Imm,
    LinkAddress,
    Memory,
    OnDone,
    PagedWrite,
    RegionDescriptor,
    SingleWrite,
    SourceRegion,
)
from transport.dll import load_libfabric
from transport.errors import LinkClosed, NotConnected, RegionBusy, TransportClosed, TransportError
from transport.fabric.domain import Domain, Region
from transport.fabric.info import profile_named
from transport.fabric.lane import Lane
from transport.fabric.posting import Calls, bind_loops
from transport.fabric.worker import Worker
from transport.imm import ImmediateCounters
from transport.transfer import Order, TransferState, check_descriptor, immediate_order, paged_order, single_order


class FabricSource:
    """Implements `transport.api.SourceRegion`. `users` are the transfers that read from it."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.users: set[TransferState] = set()

    @property
    def memory(self) -> Memory:
        return self.region.memory

    @property
    def desc(self) -> int:
        """What the provider takes as the local descriptor of a write."""
        return self.region.desc


class FabricExposure:
    """Implements `transport.api.ExposedRegion`."""

    def __init__(self, region: Region) -> None:
        assert region.descriptor is not None
        self._descriptor = region.descriptor

    @property
    def descriptor(self) -> RegionDescriptor:
        return self._descriptor


class FabricLink:
    """Implements `transport.api.Link`."""

    def __init__(self, worker: Worker, lane: Lane, provider: str) -> None:
        self._worker, self._lane, self._provider = worker, lane, provider
        self._address = LinkAddress(DESCRIPTOR_VERSION, provider, lane.endpoint.name)
        self._connected = False
        self._closed = False

    @property
    def address(self) -> LinkAddress:
        return self._address

    @property
    def in_flight(self) -> int:
        return self._lane.outgoing.in_flight

    @property
    def error(self) -> TransportError | None:
        return self._lane.error

    def expose(self, memory: Memory) -> FabricExposure:
        """Raises LinkClosed, FabricError."""
        self._check_open()
        return FabricExposure(self._worker.expose(self._lane, memory))

    def connect(self, peer: LinkAddress, *, window: int, name: str = "") -> None:
        """Raises ValueError, DescriptorMismatch, LinkClosed, FabricError. A peer that is not there fails the writes."""
        self._check_open()
        check_descriptor(peer, self._provider)
        if window < 1:
            raise ValueError(f"window must be at least 1, not {window}")
        if self._connected:
            raise ValueError(f"the link is connected already, to {self._lane.peer or 'a peer'}: open another one")
        self._worker.inbox.call(lambda: self._lane.connect(peer.name, window, name))
        self._connected = True

    def write_paged(self, write: PagedWrite, on_done: OnDone | None = None) -> TransferState:
        """Raises ValueError, DescriptorMismatch, NotConnected, LinkClosed."""
        return self._submit(paged_order(write, self._provider), on_done)

    def write(self, write: SingleWrite, on_done: OnDone | None = None) -> TransferState:
        """Raises ValueError, DescriptorMismatch, NotConnected, LinkClosed."""
        return self._submit(single_order(write, self._provider), on_done)

    def immediate(self, target: RegionDescriptor, imm: Imm, on_done: OnDone | None = None) -> TransferState:
        """Raises ValueError, DescriptorMismatch, NotConnected, LinkClosed."""
        return self._submit(immediate_order(target, imm, self._provider), on_done)

    def close(self) -> None:
        self._closed = True
        self._worker.close_lane(self._lane)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, order: Order, on_done: OnDone | None) -> TransferState:
        self._check_open()
        if not self._connected:
            raise NotConnected("the link has no peer yet: connect it before writing")
        transfer = TransferState(order, on_done, self._lane.peer, self._cancel)
        try:
            self._worker.inbox.send(lambda: self._lane.outgoing.submit(transfer))
        except TransportClosed as error:
            transfer.stop(error)
            transfer.finish()
            raise
        return transfer

    def _cancel(self, transfer: TransferState) -> None:
        with suppress(TransportClosed):  # then it is done, or about to be
            self._worker.inbox.send(lambda: self._lane.outgoing.cancel(transfer))

    def _check_open(self) -> None:
        if self._closed:
            raise LinkClosed(f"the link to {self._lane.peer or 'its peer'} is closed")


class TransferEngine:
    """Implements `transport.api.Transport` over libfabric.

    `provider` is a profile's name (see `transport.fabric.info`), `library` the path of libfabric, `bind_address` the
    IP address of the interface to use. `calls` chooses how the data path calls the library: compiled loops or ctypes.
    `stall_timeout_s` is how long a peer may refuse every write before it counts as lost.
    Raises LibraryMissing, ProviderUnavailable, FabricError.
    """

    def __init__(
        self,
        provider: str = "tcp",
        *,
        library: str | None = None,
        bind_address: str | None = None,
        calls: Calls = "auto",
        stall_timeout_s: float = 10.0,
    ) -> None:
        self._profile = profile_named(provider)
        self._library = load_libfabric(library)
        domain = Domain(self._library, self._profile, bind_address)
        loops = bind_loops(calls)
        self.calls: str = loops.kind
        """`numba` or `ctypes`: what `calls="auto"` came to."""
        self._tx_depth = domain.tx_depth
        self._immediates = ImmediateCounters(on_waiting=lambda: self._worker.inbox.nudge())
        self._worker = Worker(domain, loops, self._immediates, stall_timeout_s)
        self._close_lock = threading.Lock()
        self._closed = False

    @property
    def provider(self) -> str:
        return self._profile.name

    @property
    def receiver_pulls(self) -> bool:
        return self._profile.receiver_pulls

    @property
    def library(self) -> str:
        """Path of the libfabric that is used."""
        return self._library.path

    @property
    def immediates(self) -> ImmediateCounters:
        return self._immediates

    @property
    def error(self) -> TransportError | None:
        return self._worker.error

    @property
    def max_window(self) -> int:
        depth = self._profile.cq_depth
        return depth - min(self._tx_depth, depth // 2)

    def register(self, memory: Memory) -> FabricSource:
        """Raises FabricError, TransportClosed."""
        return FabricSource(self._worker.register(memory))

    def unregister(self, region: SourceRegion) -> None:
        """Raises RegionBusy, TransportClosed."""
        if not isinstance(region, FabricSource):
            raise TypeError(f"{type(region).__name__} was not made by TransferEngine.register")
        users = sorted(map(str, list(region.users)))
        if users:
            raise RegionBusy(f"the region is still read by {', '.join(users)}: wait for them or close their link")
        self._worker.release(region.region)

    def open_link(self) -> FabricLink:
        """Raises FabricError, TransportClosed."""
        return FabricLink(self._worker, self._worker.open_lane(), self._profile.name)

    def stats(self) -> dict[str, int]:
        outbox = self._worker.outbox
        return {
            "writes_posted": outbox.posted,
            "writes_completed": outbox.completed,
            "writes_failed": outbox.failed,
            "bytes_completed": outbox.bytes_completed,
            "immediates_late": self._immediates.late,
            "links_open": self._worker.links_open,
        }

    def close(self) -> None:
        """Closes all links and joins the worker. Idempotent. Raises TransportError when called from a callback."""
        with self._close_lock:
            if not self._closed:
                self._worker.stop()
                self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
