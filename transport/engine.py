"""`TransferEngine`: the transport over libfabric. What is asked of it is passed to the worker thread."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self

from transport.api import Memory, OnMessage, SourceRegion
from transport.dll import load_libfabric
from transport.errors import TransportError
from transport.fabric.group import open_domains
from transport.fabric.link import FabricLink, Identity
from transport.fabric.mailbox import MESSAGE_SLOTS
from transport.fabric.posting import Calls, bind_loops
from transport.fabric.profiles import profile_named
from transport.fabric.regions import FabricSource, Nic
from transport.fabric.worker import Setting, Worker
from transport.imm import ImmediateCounters
from transport.inbox import pin


class TransferEngine:
    """Implements `transport.api.Transport` over libfabric.

    `provider` is a profile's name (see `transport.fabric.profiles`), `library` the path of libfabric, `nics` the NICs
    to use, by address or device name (None: the provider's best). `calls` chooses how the data path calls the library:
    compiled loops or ctypes. `stall_timeout_s` is how long a peer may refuse every write before it counts as lost.
    `cpu` is where the worker thread is kept. `spin`: it never sleeps while links are open, at the cost of a core (None:
    as the profile says).
    Raises LibraryMissing, ProviderUnavailable, FabricError, ValueError (no such CPU).
    """

    def __init__(
        self,
        provider: str = "tcp",
        *,
        nics: tuple[str, ...] | None = None,
        library: str | None = None,
        calls: Calls = "auto",
        stall_timeout_s: float = 10.0,
        cpu: int | None = None,
        spin: bool | None = None,
    ) -> None:
        self._profile = profile_named(provider)
        self._library = load_libfabric(library)
        loops = bind_loops(calls)
        self.calls: str = loops.kind
        """`numba` or `ctypes`: what `calls="auto"` came to."""
        self._identity = Identity(self._profile.name, secrets.randbits(64))
        domains = open_domains(self._library, self._profile, nics)
        self._nics = [Nic(index, domain) for index, domain in enumerate(domains)]
        self._immediates = ImmediateCounters(on_waiting=lambda: self._worker.inbox.nudge())
        try:
            self._worker = Worker(self._nics, loops, self._immediates, Setting(stall_timeout_s, spin))
        except BaseException:
            for domain in domains:
                domain.close()
            raise
        self._close_lock = threading.Lock()
        self._closed = False
        if cpu is not None:
            try:
                pin(self._worker.inbox, cpu)
            except ValueError:
                self.close()
                raise

    @property
    def provider(self) -> str:
        return self._profile.name

    @property
    def incarnation(self) -> int:
        return self._identity.incarnation

    @property
    def description(self) -> str:
        return f"{self.provider} over {', '.join(self.nics)}, by {self._library}"

    @property
    def revokes(self) -> bool:
        return self._profile.revokes

    @property
    def receiver_pulls(self) -> bool:
        return self._profile.receiver_pulls

    @property
    def library(self) -> str:
        """Path of the libfabric that is used."""
        return self._library.path

    @property
    def nics(self) -> tuple[str, ...]:
        """The NICs that it has opened, by rail."""
        return tuple(nic.name for nic in self._nics)

    @property
    def immediates(self) -> ImmediateCounters:
        return self._immediates

    @property
    def error(self) -> TransportError | None:
        return self._worker.error

    @property
    def max_window(self) -> int:
        return min(nic.domain.profile.max_window(nic.domain.tx_depth + MESSAGE_SLOTS) for nic in self._nics)

    def register(self, memory: Memory) -> FabricSource:
        """Raises FabricError, TransportClosed."""
        return self._worker.register(memory)

    def unregister(self, region: SourceRegion) -> None:
        """Raises RegionBusy, TransportClosed."""
        if not isinstance(region, FabricSource):
            raise TypeError(f"{type(region).__name__} was not made by TransferEngine.register")
        self._worker.release(region)

    def open_link(self, on_message: OnMessage | None = None) -> FabricLink:
        """Raises FabricError, TransportClosed."""
        return FabricLink(self._worker, self._worker.open_end(on_message), self._identity)

    def polling(self) -> AbstractContextManager[Callable[[], None]]:
        """`with engine.polling() as poll:` the calling thread takes the worker's place, which costs the least latency.

        `poll()` runs one turn without waiting: it drains, posts and calls back. What this thread asks of the engine
        runs at once; what others ask waits for the next `poll()`. Raises TransportError where another thread polls.
        """
        return self._worker.polling()

    def stats(self) -> dict[str, int]:
        outbox = self._worker.outbox
        return {
            "writes_posted": outbox.posted,
            "writes_completed": outbox.completed,
            "writes_failed": outbox.failed,
            "bytes_completed": outbox.bytes_completed,
            "immediates_late": self._immediates.late,
            "messages_sent": outbox.messages_sent,
            "messages_received": outbox.messages_received,
            "paths_lost": outbox.paths_lost,
            "links_open": self._worker.links_open,
        }

    def nic_stats(self) -> dict[str, int]:
        """Writes posted through each NIC, by its name."""
        return {nic.name: nic.posted for nic in self._nics}

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
