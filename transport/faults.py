"""The fault layer: `FaultyTransport` wraps any transport and plays an unlucky or hostile network, from a seed.

It sits above the transport: a write is cut into pieces, which are held back, mixed and handed on one by one, so that
the transport below posts late and out of order what would have gone out at once. Counts stay exact: `posted` and
`completed` of a transfer are the sums over its pieces, and it is done when nothing more will come of it. What has been
handed on is real: it lands, or fails, as the transport below decides. Only what goes out of this side suffers, so wrap
both sides where both shall.
"""

from __future__ import annotations

import threading
from typing import Self

from transport.api import Immediates, Memory, OnMessage, SourceRegion, Transport
from transport.errors import RegionBusy, TransportClosed, TransportError
from transport.fault_plan import Dice, FaultPlan
from transport.fault_schedule import Schedule
from transport.faulty_link import FaultyLink

__all__ = ["FaultPlan", "FaultyLink", "FaultyTransport"]


class FaultyTransport:
    """Implements `transport.api.Transport` around `inner`, which it owns: closing it closes both."""

    def __init__(self, inner: Transport, plan: FaultPlan) -> None:
        self.inner, self.plan = inner, plan
        self.dice = Dice(plan)
        self.schedule = Schedule("transport-faults")
        self._lock = threading.Lock()
        self._links: set[FaultyLink] = set()
        self._closed = False

    @property
    def provider(self) -> str:
        return self.inner.provider

    @property
    def incarnation(self) -> int:
        return self.inner.incarnation

    @property
    def description(self) -> str:
        return f"{self.inner.description}; under faults, seed {self.plan.seed}"

    @property
    def revokes(self) -> bool:
        return self.inner.revokes

    @property
    def immediates(self) -> Immediates:
        return self.inner.immediates

    @property
    def receiver_pulls(self) -> bool:
        return self.inner.receiver_pulls

    @property
    def error(self) -> Exception | None:
        return self.inner.error

    @property
    def max_window(self) -> int:
        return self.inner.max_window

    @property
    def links(self) -> list[FaultyLink]:
        """Those that are open."""
        with self._lock:
            return list(self._links)

    def register(self, memory: Memory) -> SourceRegion:
        return self.inner.register(memory)

    def unregister(self, region: SourceRegion) -> None:
        """Raises RegionBusy: also for what is held back."""
        users = sorted(str(each) for link in self.links for each in link.transfers if each.region is region)
        if users:
            raise RegionBusy(f"the region is still read by {', '.join(users)}: wait for them or close their link")
        self.inner.unregister(region)

    def open_link(self, on_message: OnMessage | None = None) -> FaultyLink:
        self.check_open()
        link = FaultyLink(self, on_message)
        with self._lock:
            self._links.add(link)
        return link

    def stats(self) -> dict[str, int]:
        return self.inner.stats()

    def close(self) -> None:
        """Idempotent. Raises TransportError when called from a callback."""
        if self.schedule.on_thread:
            raise TransportError("a transport cannot be closed from its own callbacks")
        with self._lock:
            self._closed = True
        self.inner.close()
        self.schedule.close()
        for link in self.links:
            for transfer in link.transfers:
                transfer.stop(TransportClosed("the transport is closed"))

    def check_open(self) -> None:
        """Raises TransportClosed."""
        if self._closed:
            raise TransportClosed("the transport is closed")

    def forget(self, link: FaultyLink) -> None:
        with self._lock:
            self._links.discard(link)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
