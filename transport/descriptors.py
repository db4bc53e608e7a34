"""What peers tell each other before a write: memory, regions and where a link can be reached. Versioned bytes.

`to_bytes` gives a document that `from_bytes` of another process, version or Python reads, or refuses by naming both
versions; nothing of it is executed. All classes are frozen and picklable too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, Self

from transport.errors import DescriptorMismatch

DESCRIPTOR_VERSION = 2


@dataclass(frozen=True, slots=True)
class Device:
    """Where memory lies: the host's, or that of the accelerator with this index."""

    kind: Literal["host", "cuda"] = "host"
    index: int = 0

    def __str__(self) -> str:
        return "host" if self.kind == "host" else f"{self.kind}:{self.index}"


HOST = Device()


@dataclass(frozen=True, slots=True)
class Memory:
    """A range of this process's address space. The caller keeps it mapped for as long as it is registered.

    Device memory is given by its device address; with `dmabuf_fd`, it is registered through that file, in which it
    starts at `dmabuf_offset_bytes`.
    """

    address: int
    length_bytes: int
    device: Device = HOST
    dmabuf_fd: int | None = None
    dmabuf_offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """Where a link can be reached: one provider name and one rail per NIC, in the order of every descriptor's keys.

    `provider` must agree on both sides. `doorbell` names a socket that wakes the link's process on this host; empty
    where the provider wakes by itself.
    """

    version: int
    provider: str
    incarnation: int
    names: tuple[bytes, ...]
    rails: tuple[int, ...]
    doorbell: bytes = b""

    def to_bytes(self) -> bytes:
        names = [name.hex() for name in self.names]
        return _packed(
            "address", self.version,
            provider=self.provider, incarnation=self.incarnation, names=names, rails=self.rails,
            doorbell=self.doorbell.hex(),
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises DescriptorMismatch."""
        with _Reading("address", data) as f:
            names, rails = _unhexed(f["names"]), tuple(_number(rail) for rail in _several(f["rails"]))
            if len(names) != len(rails):
                raise ValueError(f"{len(names)} names, but {len(rails)} rails")
            incarnation, doorbell = _number(f["incarnation"]), bytes.fromhex(f["doorbell"])
            return cls(f["version"], _text(f["provider"]), incarnation, names, rails, doorbell)


@dataclass(frozen=True, slots=True)
class RegionDescriptor:
    """What a peer needs to write into a region that was exposed to it. `keys` has one key per NIC of the link.

    `base` is what remote offsets are added to (0 or a virtual address: the provider's rule, already applied).
    """

    version: int
    provider: str
    incarnation: int
    base: int
    length_bytes: int
    keys: tuple[bytes, ...]
    device: Device = HOST

    def to_bytes(self) -> bytes:
        keys = [key.hex() for key in self.keys]
        return _packed(
            "descriptor", self.version,
            provider=self.provider, incarnation=self.incarnation, base=self.base, length_bytes=self.length_bytes,
            keys=keys, device=[self.device.kind, self.device.index],
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises DescriptorMismatch."""
        with _Reading("descriptor", data) as f:
            kind, index = _several(f["device"])
            if kind not in ("host", "cuda"):
                raise ValueError(f"unknown device {kind!r}")
            incarnation, base, length = _number(f["incarnation"]), _number(f["base"]), _number(f["length_bytes"])
            device, keys = Device(kind, _number(index)), _unhexed(f["keys"])
            return cls(f["version"], _text(f["provider"]), incarnation, base, length, keys, device)


def check_descriptor(given: RegionDescriptor | LinkAddress, provider: str) -> None:
    """Raises DescriptorMismatch."""
    kind = "descriptor" if isinstance(given, RegionDescriptor) else "address"
    _check_version(kind, given.version)
    if given.provider != provider:
        raise DescriptorMismatch(f"the peer's {kind} is for provider {given.provider!r}, this side uses {provider!r}")


def check_target(target: RegionDescriptor, peer: LinkAddress) -> None:
    """A write's target must be of the link's peer. Raises DescriptorMismatch."""
    if target.incarnation != peer.incarnation:
        raise DescriptorMismatch(
            "the descriptor is of another peer than the link's, or of the same before it restarted"
        )
    if len(target.keys) != len(peer.names):
        raise DescriptorMismatch(
            f"the descriptor has {len(target.keys)} keys, but the link's peer has {len(peer.names)} NICs"
        )


def _check_version(kind: str, version: object) -> None:
    if version != DESCRIPTOR_VERSION:
        raise DescriptorMismatch(f"the peer's {kind} has version {version}, this side speaks {DESCRIPTOR_VERSION}")


def _packed(kind: str, version: int, **fields: Any) -> bytes:
    return json.dumps({"kind": kind, "version": version, **fields}, separators=(",", ":")).encode()


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{value!r} is no unsigned 64-bit number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _several(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise TypeError(f"{value!r} is no list, or an empty one")
    return value


def _unhexed(values: Any) -> tuple[bytes, ...]:
    return tuple(bytes.fromhex(value) for value in _several(values))


class _Reading:
    """Turns whatever is wrong with foreign bytes into DescriptorMismatch; the version is looked at first."""

    def __init__(self, kind: str, data: bytes) -> None:
        self._kind, self._data = kind, data

    def __enter__(self) -> dict[str, Any]:
        try:
            fields = json.loads(self._data)
            kind = fields["kind"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DescriptorMismatch(f"these {len(self._data)} bytes hold no {self._kind}") from error
        if kind != self._kind:
            raise DescriptorMismatch(f"these bytes hold another thing than this {self._kind}: {kind!r}")
        _check_version(self._kind, fields.get("version"))
        return dict(fields)

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, (ValueError, TypeError, KeyError, AttributeError)):
            raise DescriptorMismatch(f"the peer's {self._kind} is damaged: {error!r}") from error
