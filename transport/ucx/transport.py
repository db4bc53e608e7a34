"""`UcxTransport`: the transport over libucp. What is asked of it is passed to the worker thread."""

from __future__ import annotations

from transport.api import Memory, OnMessage, SourceRegion
from transport.errors import ProviderUnavailable
from transport.owned_link import OwnedLink
from transport.owned_transport import OwnedTransport
from transport.ucx.binding import Calls, bind_loops
from transport.ucx.calls import PROVIDER
from transport.ucx.context import opened
from transport.ucx.dll import load_libucp
from transport.ucx.link_end import LinkEnd, UcxSource
from transport.ucx.worker import Worker

_MAX_WINDOW = 1 << 16
"""Sockets hold back what is not read, so there is no queue to overrun; this bounds what waits in them."""


class UcxTransport(OwnedTransport[Worker]):
    """Implements `transport.api.Transport` over libucp.

    `nics` are network devices as UCX names them ("eth0", "mlx5_0:1"; None: all). `tls` are UCX's transports; `tcp`
    keeps the promise of `Link.close`, with any other `revokes` is False. `library` is the path of libucp. `calls`
    chooses how the data path calls it: compiled loops or ctypes. `stall_timeout_s` is how long a peer may leave the
    first greeting unanswered before it counts as lost. `cpu` is where the worker thread is kept.
    Raises LibraryMissing, ProviderUnavailable, FabricError, ValueError.
    """

    def __init__(
        self,
        provider: str = PROVIDER,
        *,
        nics: tuple[str, ...] | None = None,
        tls: tuple[str, ...] = ("tcp",),
        library: str | None = None,
        calls: Calls = "auto",
        stall_timeout_s: float = 10.0,
        cpu: int | None = None,
    ) -> None:
        if provider != PROVIDER:
            raise ProviderUnavailable(f"UcxTransport is the provider {PROVIDER!r}, not {provider!r}")
        super().__init__(provider)
        self._library = load_libucp(library)
        loops = bind_loops(calls)
        self.calls: str = loops.kind
        """`numba` or `ctypes`: what `calls="auto"` came to."""
        self._context = opened(self._library, tls, nics)
        try:
            worker = Worker(self._context, loops, self._immediates, stall_timeout_s)
        except BaseException:
            self._context.close()
            raise
        self._begin(worker, cpu)

    @property
    def description(self) -> str:
        version = ".".join(map(str, self._library.version))
        devices = ", ".join(self._context.nics) if self._context.nics else "all devices"
        return f"ucx ({', '.join(self._context.tls)}) over {devices}, by libucp {version} from {self._library.path}"

    @property
    def revokes(self) -> bool:
        return self._context.revokes

    @property
    def receiver_pulls(self) -> bool:
        return not self._context.revokes

    @property
    def library(self) -> str:
        """Path of the libucp that is used."""
        return self._library.path

    @property
    def nics(self) -> tuple[str, ...]:
        """The network devices that UCX was told to use; empty: all."""
        return self._context.nics or ()

    @property
    def max_window(self) -> int:
        return _MAX_WINDOW

    def register(self, memory: Memory) -> UcxSource:
        """Raises FabricError, ProviderUnavailable, TransportClosed."""
        return UcxSource(self._worker.register(memory))

    def unregister(self, region: SourceRegion) -> None:
        """Raises RegionBusy, TransportClosed."""
        if not isinstance(region, UcxSource):
            raise TypeError(f"{type(region).__name__} was not made by UcxTransport.register")
        self._worker.release(region)

    def open_link(self, on_message: OnMessage | None = None) -> OwnedLink[LinkEnd]:
        """Raises FabricError, TransportClosed."""
        return OwnedLink(self._worker, self._worker.open_end(on_message), self._identity)
