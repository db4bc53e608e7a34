"""`TransferEngine`: the transport over libfabric. What is asked of it is passed to the worker thread."""

from __future__ import annotations

from transport.api import Memory, OnMessage, SourceRegion
from transport.dll import load_libfabric
from transport.fabric.group import open_domains
from transport.fabric.link_end import LinkEnd
from transport.fabric.mailbox import MESSAGE_SLOTS
from transport.fabric.posting import Calls, bind_loops
from transport.fabric.profiles import profile_named
from transport.fabric.regions import FabricSource, Nic
from transport.fabric.worker import Setting, Worker
from transport.owned_link import OwnedLink
from transport.owned_transport import OwnedTransport


class TransferEngine(OwnedTransport[Worker]):
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
        super().__init__(self._profile.name)
        self._library = load_libfabric(library)
        loops = bind_loops(calls)
        self.calls: str = loops.kind
        """`numba` or `ctypes`: what `calls="auto"` came to."""
        domains = open_domains(self._library, self._profile, nics)
        self._nics = [Nic(index, domain) for index, domain in enumerate(domains)]
        try:
            worker = Worker(self._nics, loops, self._immediates, Setting(stall_timeout_s, spin))
        except BaseException:
            for domain in domains:
                domain.close()
            raise
        self._begin(worker, cpu)

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

    def open_link(self, on_message: OnMessage | None = None) -> OwnedLink[LinkEnd]:
        """Raises FabricError, TransportClosed."""
        return OwnedLink(self._worker, self._worker.open_end(on_message), self._identity)

    def nic_stats(self) -> dict[str, int]:
        """Writes posted through each NIC, by its name."""
        return {nic.name: nic.posted for nic in self._nics}
