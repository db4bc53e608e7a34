"""Where the links of in-process transports find each other."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transport.loopback_link import LoopbackLink


class LoopbackNet:
    """Transports that share one reach each other. A name stands for one NIC of one link."""

    def __init__(self) -> None:
        self._names = itertools.count()
        self._ends: dict[bytes, tuple[LoopbackLink, int]] = {}

    def new_name(self) -> bytes:
        return f"loopback:{next(self._names)}".encode()

    def add(self, link: LoopbackLink) -> None:
        for lane, name in enumerate(link.address.names):
            self._ends[name] = link, lane

    def remove(self, name: bytes) -> None:
        self._ends.pop(name, None)

    def find(self, name: bytes) -> tuple[LoopbackLink, int] | None:
        """The link and which of its NICs it is."""
        return self._ends.get(name)


DEFAULT_NET = LoopbackNet()
