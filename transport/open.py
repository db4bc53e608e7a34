"""Opens a transport by the name of its provider; each library is loaded when it is asked for."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack

from transport.api import Transport


class Options(TypedDict, total=False):
    """All may be left out; see `transport.engine.TransferEngine` and `transport.ucx.UcxTransport`."""

    nics: tuple[str, ...] | None
    """By address or device name; None: the best there is."""
    library: str | None
    """Path of libfabric."""
    ucx_library: str | None
    """Path of libucp."""
    cpu: int | None
    """For the worker thread."""
    spin: bool | None
    """Not for UCX."""
    stall_timeout_s: float
    calls: Literal["auto", "numba", "ctypes"]
    """How the data path calls the library."""


def open_transport(provider: str, **options: Unpack[Options]) -> Transport:
    """Raises LibraryMissing, ProviderUnavailable, FabricError."""
    nics, cpu = options.get("nics"), options.get("cpu")
    stall_timeout_s, calls = options.get("stall_timeout_s", 10.0), options.get("calls", "auto")
    if provider == "ucx":
        from transport.ucx import UcxTransport

        return UcxTransport(
            provider,
            nics=nics, library=options.get("ucx_library"), calls=calls, stall_timeout_s=stall_timeout_s, cpu=cpu,
        )  # fmt: skip
    from transport.engine import TransferEngine

    return TransferEngine(
        provider,
        nics=nics, library=options.get("library"), calls=calls, stall_timeout_s=stall_timeout_s, cpu=cpu,
        spin=options.get("spin"),
    )  # fmt: skip
