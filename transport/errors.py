"""Errors of the transport.

TransportError
├── LibraryMissing         libfabric or libucp cannot be loaded; the message says what to install
├── ProviderUnavailable    the library is there, but not the provider or NIC asked for
├── FabricError            a library call or a posted write failed: call, code, text, provider, NIC, peer
│   └── PeerLost               … because the peer is gone or cannot be reached
├── DescriptorMismatch     an address or descriptor is of another version or provider
├── NotConnected           a write on a link that has no peer yet
├── LinkClosed             the link was closed before the transfer had completed
├── TransferCancelled      the transfer was cancelled before all of its writes were posted
├── MessageTooLarge        a message above MAX_MESSAGE_BYTES
├── BacklogFull            the peer takes no messages, and too many wait for it
├── RegionBusy             a source region is still being read by transfers
└── TransportClosed        the transport was closed
    └── TransportFailed    … because its worker thread ended by an error
"""

from __future__ import annotations

from typing import Any


class TransportError(Exception):
    """Base of everything that transport raises on purpose."""


class LibraryMissing(TransportError):
    """The wire library cannot be loaded; the message says where it was looked for and what to install."""


class ProviderUnavailable(TransportError):
    """The library has no such provider on this machine; the message says which there are."""


class FabricError(TransportError):
    """A library call, or a write that was posted, failed.

    `code` is the positive error number, `strerror` its text, `peer` the name given to `Link.connect`, `nic` the local
    interface ("" where none).
    """

    def __init__(
        self, call: str, code: int, strerror: str, provider: str = "", peer: str = "", *, nic: str = ""
    ) -> None:
        self.call, self.code, self.strerror, self.provider, self.peer, self.nic = (
            call, code, strerror, provider, peer, nic,
        )  # fmt: skip
        where = f" on {provider}" if provider else ""
        through = f" through {nic}" if nic else ""
        towards = f" towards {peer}" if peer else ""
        super().__init__(f"{call}{where}{through}{towards} failed: {strerror} (error {code})")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.call, self.code, self.strerror, self.provider, self.peer, self.nic)


def _rebuilt(kind: type[FabricError], *fields: Any) -> FabricError:
    return kind(*fields[:-1], nic=fields[-1])


class PeerLost(FabricError):
    """The peer is gone or cannot be reached. It may still have received any write that was posted."""


class DescriptorMismatch(TransportError):
    """An address or a descriptor was made by another protocol version or provider; the message names both."""


class NotConnected(TransportError):
    """The link has no peer yet: call `connect` first."""


class LinkClosed(TransportError):
    """The link was closed. A write that was in flight may or may not have landed."""


class TransferCancelled(TransportError):
    """The transfer was cancelled before all of its writes were posted; `Transfer.posted` says how many were."""


class MessageTooLarge(TransportError):
    """A message is longer than a link carries; what is large travels by a write."""


class BacklogFull(TransportError):
    """Too many bytes of messages wait for a peer that takes none."""


class RegionBusy(TransportError):
    """The region is still the source of transfers, which the message names; wait for them or close their link."""


class TransportClosed(TransportError):
    """The transport was closed."""


class TransportFailed(TransportClosed):
    """The transport's worker thread ended by an error, which the message names: nothing but a new transport helps."""
