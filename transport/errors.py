"""Errors of the transport.

TransportError
├── LibraryMissing         libfabric cannot be loaded; the message says what to install
├── ProviderUnavailable    libfabric is there, but not the provider asked for
├── FabricError            a libfabric call or a posted write failed: call, code, text, provider, peer
│   └── PeerLost               … because the peer is gone or cannot be reached
├── DescriptorMismatch     an address or descriptor is of another version or provider
├── NotConnected           a write on a link that has no peer yet
├── LinkClosed             the link was closed before the transfer had completed
├── TransferCancelled      the transfer was cancelled before all of its writes were posted
├── RegionBusy             a source region is still being read by transfers
└── TransportClosed        the transport was closed
    └── TransportFailed    … because its worker thread ended by an error
"""

from __future__ import annotations


class TransportError(Exception):
    """Base of everything that transport raises on purpose."""


class LibraryMissing(TransportError):
    """The wire library cannot be loaded; the message says where it was looked for and what to install."""


class ProviderUnavailable(TransportError):
    """The library has no such provider on this machine; the message says which there are."""


class FabricError(TransportError):
    """A libfabric call, or a write that was posted, failed.

    `code` is the positive error number, `strerror` its text, `peer` the name given to `Link.connect` ("" where none).
    """

    def __init__(self, call: str, code: int, strerror: str, provider: str = "", peer: str = "") -> None:
        self.call, self.code, self.strerror, self.provider, self.peer = call, code, strerror, provider, peer
        where = f" on {provider}" if provider else ""
        towards = f" towards {peer}" if peer else ""
        super().__init__(f"{call}{where}{towards} failed: {strerror} (error {code})")


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


class RegionBusy(TransportError):
    """The region is still the source of transfers, which the message names; wait for them or close their link."""


class TransportClosed(TransportError):
    """The transport was closed."""


class TransportFailed(TransportClosed):
    """The transport's worker thread ended by an error, which the message names: nothing but a new transport helps."""
