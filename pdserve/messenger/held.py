"""What a peer may still write to although its link was closed: kept until it is known that it does so no more."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.kv.pool import PagePool
from pdserve.messenger.slots import SlotTable
from pdserve.types import Incarnation, NodeId, PageIndex
from transport.api import Imm

SETTLE_S = 1.0
"""What a NIC has sent before its link was closed may be under way for the lifetime of a packet, which is far less."""


@dataclass(frozen=True, slots=True)
class _Held:
    peer: Incarnation
    node: NodeId
    meeting: int  # its number
    pages: tuple[PageIndex, ...]
    imm: Imm


class HeldMemory:
    """Pages (quarantined) and slots. Only where closing our side is not enough: see `Transport.revokes`."""

    def __init__(self, pool: PagePool, slots: SlotTable) -> None:
        self._pool = pool
        self._slots = slots
        self._held: list[_Held] = []
        self._settling: list[tuple[float, _Held]] = []  # when it is safe, what

    def __len__(self) -> int:
        """Handoffs whose memory is held."""
        return len(self._held) + len(self._settling)

    @property
    def peers(self) -> dict[NodeId, Incarnation]:
        """Those that may still write."""
        return {held.node: held.peer for held in self._held}

    def hold(self, node: NodeId, peer: Incarnation, meeting: int, memory: tuple[tuple[PageIndex, ...], Imm]) -> None:
        self._held.append(_Held(peer, node, meeting, *memory))

    def release(self, peer: Incarnation) -> None:
        """Its process has ended."""
        ended = [held for held in self._held if held.peer == peer]
        ended += [held for _, held in self._settling if held.peer == peer]
        self._held = [held for held in self._held if held.peer != peer]
        self._settling = [entry for entry in self._settling if entry[1].peer != peer]
        for held in ended:
            self._free(held)

    def closed(self, peer: Incarnation, through: int, now: float) -> int:
        """It has closed its side of all meetings up to this number. Returns how many handoffs that concerns."""
        safe = [held for held in self._held if held.peer == peer and held.meeting <= through]
        self._held = [held for held in self._held if held not in safe]
        self._settling += [(now + SETTLE_S, held) for held in safe]
        return len(safe)

    def check(self, now: float) -> None:
        """Frees what has settled."""
        due = [held for at, held in self._settling if now >= at]
        self._settling = [entry for entry in self._settling if now < entry[0]]
        for held in due:
            self._free(held)

    def _free(self, held: _Held) -> None:
        self._slots.give_back(held.imm)
        self._pool.release(held.pages)
