"""The one place where statuses of UCX are read."""

from __future__ import annotations

import logging

from transport.errors import FabricError, PeerLost
from transport.ucx import abi
from transport.ucx.dll import UcxLibrary

log = logging.getLogger(__name__)

PROVIDER = "ucx"
_LOST = frozenset(
    {
        abi.UCS_ERR_UNREACHABLE, abi.UCS_ERR_TIMED_OUT, abi.UCS_ERR_REJECTED, abi.UCS_ERR_NOT_CONNECTED,
        abi.UCS_ERR_CONNECTION_RESET, abi.UCS_ERR_CANCELED,
    }
)  # fmt: skip
_FAILURES = range(abi.UCS_ERR_LAST_ENDPOINT_FAILURE, abi.UCS_ERR_FIRST_LINK_FAILURE + 1)
"""Failures of links (−40 … −59) and of endpoints (−60 … −89)."""


def ucx_error(library: UcxLibrary, call: str, status: int, peer: str = "", nic: str = "") -> FabricError:
    """The error for a negative status; its `code` is positive."""
    lost = status in _LOST or status in _FAILURES
    return (PeerLost if lost else FabricError)(call, -status, library.strerror(status), PROVIDER, peer, nic=nic)


def check(library: UcxLibrary, call: str, status: int, peer: str = "", nic: str = "") -> None:
    """Raises FabricError, which names the call, for a negative status."""
    if status < 0:
        raise ucx_error(library, call, status, peer, nic)


def is_error(request: int) -> bool:
    """Whether what a non-blocking call returned is a status and no request."""
    return abi.UCS_ERR_LAST <= request < 0
