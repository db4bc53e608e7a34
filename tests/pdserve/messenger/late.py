"""A loopback whose writes complete at the sender before they land: local completion proves nothing about placement."""

from __future__ import annotations

import ctypes
import random
import time
from dataclasses import replace

import numpy as np

from transport.api import OnMessage
from transport.fault_schedule import Schedule
from transport.loopback import LoopbackNet, LoopbackTransport
from transport.loopback_link import Landing, LoopbackLink
from transport.loopback_worker import Arrival

DELAY_S = (0.0, 0.01)
LATE_S = 0.02


class LateLoopback(LoopbackTransport):
    """Half of what arrives here was acknowledged up to `LATE_S` before.

    If its link has closed by then, it is lost; or, without `revokes`, it lands all the same, and nobody is told.
    """

    def __init__(self, net: LoopbackNet, seed: int, nics: int, *, revokes: bool = True) -> None:
        super().__init__(net, seed=seed, nics=nics, delay_s=DELAY_S, revokes=revokes)
        self._dice = random.Random(seed)
        self._later = Schedule("late-landings")

    def open_link(self, on_message: OnMessage | None = None) -> LoopbackLink:
        link = super().open_link(on_message)
        now = link.land
        link.land = lambda landing: now(landing) if self._dice.random() < 0.5 else self._land_later(link, landing)  # type: ignore[method-assign]
        return link

    def close(self) -> None:
        super().close()
        self._later.close()

    def _land_later(self, link: LoopbackLink, landing: Landing) -> tuple[int, int]:
        if link.silent or link.closed:
            return LoopbackLink.land(link, landing)
        kept, payload = _lifted(landing)

        def land() -> None:
            landed, _ = LoopbackLink.land(link, kept)
            if landed:
                self.deliver(Arrival(link, kept.order.imm, landed))
            del payload[:]

        self._later.at(time.monotonic() + self._dice.uniform(0.0, LATE_S), link, land)
        return 0, 0


def _lifted(landing: Landing) -> tuple[Landing, list[np.ndarray]]:
    """The same landing from a copy of its payload, which must be kept until then: the source may change meanwhile."""
    order, blocks, size = landing.order, landing.blocks, landing.block_bytes
    source, target = order.source_index[blocks], order.target_index[blocks]
    count = len(source)
    copy = np.empty((count, size), np.uint8)
    for row, index in enumerate(source):
        copy[row] = _bytes_at(order.source + order.source_stride * int(index), size)
    lifted = replace(
        order, source=copy.ctypes.data, source_stride=size, source_index=np.arange(count), target_index=target
    )
    return replace(landing, order=lifted, blocks=slice(0, count)), [copy]


def _bytes_at(address: int, length: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
