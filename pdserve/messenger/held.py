"""What a peer may still write to although its link was closed: kept until its process has ended."""

from __future__ import annotations

from pdserve.kv.pool import PagePool
from pdserve.messenger.slots import SlotTable
from pdserve.types import Incarnation, PageIndex
from transport.api import Imm


class HeldMemory:
    """Pages (quarantined) and slots, by peer. Only for transports that cannot revoke: see `Transport.revokes`."""

    def __init__(self, pool: PagePool, slots: SlotTable) -> None:
        self._pool = pool
        self._slots = slots
        self._held: dict[Incarnation, list[tuple[tuple[PageIndex, ...], Imm]]] = {}

    def __len__(self) -> int:
        """Handoffs whose memory is held."""
        return sum(map(len, self._held.values()))

    def hold(self, peer: Incarnation, pages: tuple[PageIndex, ...], imm: Imm) -> None:
        self._held.setdefault(peer, []).append((pages, imm))

    def release(self, peer: Incarnation) -> None:
        """Its process has ended."""
        for pages, imm in self._held.pop(peer, ()):
            self._slots.give_back(imm)
            self._pool.release(pages)
