"""The transports that the conformance suite runs over, by name. `PDSERVE_TEST_TRANSPORTS=tcp,shm` selects some."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.transport.pair import Opener
from tests.transport.remote import RemoteTransport
from transport.errors import LibraryMissing, ProviderUnavailable
from transport.faults import FaultPlan, FaultyTransport
from transport.loopback import LoopbackNet, LoopbackTransport
from transport.open import open_transport

STALL_TIMEOUT_S = 2.0


def engine(provider: str, **options: Any) -> Opener:
    """Opens a real transport, or skips the test where there is no such provider."""

    def opened() -> Any:
        try:
            return open_transport(provider, stall_timeout_s=STALL_TIMEOUT_S, **options)
        except (LibraryMissing, ProviderUnavailable) as error:
            pytest.skip(str(error))

    return opened


def _alone(provider: str, **options: Any) -> tuple[Opener, Opener]:
    return engine(provider, **options), engine(provider, **options)


def _apart(provider: str, **options: Any) -> tuple[Opener, Opener]:
    """The receiver is another process: shm does not connect a process with itself."""
    return engine(provider, **options), lambda: RemoteTransport(
        provider, {"stall_timeout_s": STALL_TIMEOUT_S, **options}
    )


def _loopback(**kwargs: Any) -> tuple[Opener, Opener]:
    net, nics = LoopbackNet(), kwargs.get("nics", 1)
    return lambda: LoopbackTransport(net, **kwargs), lambda: LoopbackTransport(net, nics=nics)


def _faulty(plan: FaultPlan) -> tuple[Opener, Opener]:
    net = LoopbackNet()
    return lambda: FaultyTransport(LoopbackTransport(net, seed=9), plan), lambda: LoopbackTransport(net)


_BENIGN = FaultPlan(
    seed=10, delay_s=(0.0, 0.002), reorder=True, bytes_per_s=1e9, storm_every_s=0.05, storm_s=0.01, piece_blocks=20
)
_TWO_NICS = ("127.0.0.1", "127.0.0.2")

OPENERS: dict[str, Callable[[], tuple[Opener, Opener]]] = {
    "tcp": lambda: _alone("tcp"),
    "tcp-ctypes": lambda: _alone("tcp", calls="ctypes"),
    "tcp-2nics": lambda: _alone("tcp", nics=_TWO_NICS),
    "shm": lambda: _apart("shm"),
    "shm-ctypes": lambda: _apart("shm", calls="ctypes"),
    "sockets": lambda: _alone("sockets"),
    "rxm": lambda: _alone("tcp;ofi_rxm"),
    "verbs": lambda: _alone("verbs;ofi_rxm", spin=False),
    "ucx": lambda: _alone("ucx"),
    "ucx-ctypes": lambda: _alone("ucx", calls="ctypes"),
    "loopback": lambda: _loopback(),
    "loopback-shuffled": lambda: _loopback(seed=7, delay_s=(0.0, 0.002)),
    "loopback-2nics": lambda: _loopback(nics=2, seed=8),
    "faulty-loopback": lambda: _faulty(_BENIGN),
}
_SLOW = ("rxm", "verbs")


def chosen() -> list[Any]:
    """The parameters of this run. Raises ValueError for a name that does not exist."""
    wanted = [name for name in os.environ.get("PDSERVE_TEST_TRANSPORTS", "").split(",") if name]
    unknown = [name for name in wanted if name not in OPENERS]
    if unknown:
        raise ValueError(f"PDSERVE_TEST_TRANSPORTS names {', '.join(unknown)}; there are {', '.join(OPENERS)}")
    if wanted:
        return wanted
    return [pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in OPENERS]
