"""The decode node's side of a handoff, as a pure state machine.

allotting → requested → accepted → receiving → ready; from any: cancelling → quarantined → free.
Pages and slot are given back only after the full count, after `QuiescedAt` with as many immediates received, or after
the peer was revoked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class DecodeState(StrEnum):
    ALLOTTING = "allotting"
    REQUESTED = "requested"
    ACCEPTED = "accepted"
    RECEIVING = "receiving"
    READY = "ready"
    CANCELLING = "cancelling"  # Cancel sent, no answer yet
    QUARANTINED = "quarantined"  # P has quiesced, writes are still on their way
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Allotted:
    """Pages and slot are pinned; `expected` immediates will come."""

    expected: int


@dataclass(frozen=True, slots=True)
class Accepted:
    pass


@dataclass(frozen=True, slots=True)
class Rejected:
    reason: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class ImmediatesSeen:
    """Some immediates have come (from polling the counter)."""


@dataclass(frozen=True, slots=True)
class CountFull:
    """The armed (or retargeted) count was reached."""


@dataclass(frozen=True, slots=True)
class QuiescedAt:
    """P will post no more; it posted `posted`, of which `received` have come."""

    posted: int
    received: int
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The caller cancelled, or a deadline passed."""

    reason: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class CancelUnanswered:
    """The peer did not answer a Cancel in time; `final` when patience is at its end."""

    final: bool


@dataclass(frozen=True, slots=True)
class PeerRevoked:
    """The peer's access has ended: regions closed, endpoint closed, queue drained."""

    reason: str


DecodeEvent = (
    Allotted | Accepted | Rejected | ImmediatesSeen | CountFull | QuiescedAt | GiveUp | CancelUnanswered | PeerRevoked
)


@dataclass(frozen=True, slots=True)
class ArmCounter:
    expected: int


@dataclass(frozen=True, slots=True)
class SendRequest:
    pass


@dataclass(frozen=True, slots=True)
class SendCancel:
    pass


@dataclass(frozen=True, slots=True)
class Retarget:
    expected: int


@dataclass(frozen=True, slots=True)
class QuarantinePages:
    pass


@dataclass(frozen=True, slots=True)
class Deliver:
    """Disarm, return the slot, and let the request join the decode batch with its pages."""


@dataclass(frozen=True, slots=True)
class Free:
    """Disarm; pages (`quarantined` says from which state) and slot may be reused."""

    quarantined: bool


@dataclass(frozen=True, slots=True)
class Fail:
    """The request did not get its pages this time."""

    reason: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class RevokePeer:
    pass


DecodeInstruction = (
    ArmCounter | SendRequest | SendCancel | Retarget | QuarantinePages | Deliver | Free | Fail | RevokePeer
)

_WAITING = (DecodeState.REQUESTED, DecodeState.ACCEPTED, DecodeState.RECEIVING)
HELD = (DecodeState.CANCELLING, DecodeState.QUARANTINED)


@dataclass(slots=True)
class DecodeHandoff:
    """One handoff at the decode node."""

    state: DecodeState = DecodeState.ALLOTTING

    def handle(self, event: DecodeEvent) -> Sequence[DecodeInstruction]:
        """Takes one event; returns what to do, in this order. An event that no longer matters yields nothing."""
        match event:
            case Allotted(expected) if self.state is DecodeState.ALLOTTING:
                self.state = DecodeState.REQUESTED
                return [ArmCounter(expected), SendRequest()]
            case Accepted() if self.state is DecodeState.REQUESTED:
                self.state = DecodeState.ACCEPTED
            case ImmediatesSeen() if self.state in (DecodeState.REQUESTED, DecodeState.ACCEPTED):
                self.state = DecodeState.RECEIVING
            case CountFull():
                return self._count_full()
            case Rejected(reason, retryable):
                return self._rejected(reason, retryable)
            case GiveUp(reason, retryable):
                return self._give_up(reason, retryable)
            case QuiescedAt(posted, received, reason):
                return self._quiesced(posted, received, reason)
            case CancelUnanswered(final) if self.state in HELD:
                return [RevokePeer()] if final else self._ask_again()
            case PeerRevoked(reason):
                return self._revoked(reason)
        return []

    def _count_full(self) -> Sequence[DecodeInstruction]:
        if self.state in _WAITING:
            self.state = DecodeState.READY
            return [Deliver()]
        if self.state in HELD:
            return self._free(quarantined=True)
        return []

    def _rejected(self, reason: str, retryable: bool) -> Sequence[DecodeInstruction]:
        # A rejection says that nothing was posted and nothing will be: Quiesced(0).
        if self.state in _WAITING:
            return [*self._free(quarantined=False), Fail(reason, retryable)]
        if self.state is DecodeState.CANCELLING:
            return self._free(quarantined=True)
        return []

    def _give_up(self, reason: str, retryable: bool) -> Sequence[DecodeInstruction]:
        if self.state is DecodeState.ALLOTTING:
            self.state = DecodeState.FREE
            return [Fail(reason, retryable)]
        if self.state in _WAITING:
            self.state = DecodeState.CANCELLING
            return [SendCancel(), QuarantinePages(), Fail(reason, retryable)]
        return []

    def _quiesced(self, posted: int, received: int, reason: str) -> Sequence[DecodeInstruction]:
        if self.state not in (*_WAITING, *HELD):
            return []
        held = self.state in HELD
        fail: list[DecodeInstruction] = [] if held else [Fail(reason, retryable=True)]
        if received >= posted:
            return [*self._free(quarantined=held), *fail]
        self.state = DecodeState.QUARANTINED
        quarantine: list[DecodeInstruction] = [] if held else [QuarantinePages()]
        return [*quarantine, Retarget(posted), *fail]

    def _ask_again(self) -> Sequence[DecodeInstruction]:
        return [SendCancel()] if self.state is DecodeState.CANCELLING else []

    def _revoked(self, reason: str) -> Sequence[DecodeInstruction]:
        if self.state in _WAITING:
            return [*self._free(quarantined=False), Fail(reason, retryable=True)]
        if self.state in HELD:
            return self._free(quarantined=True)
        if self.state is DecodeState.ALLOTTING:
            self.state = DecodeState.FREE
            return [Fail(reason, retryable=True)]
        return []

    def _free(self, *, quarantined: bool) -> Sequence[DecodeInstruction]:
        self.state = DecodeState.FREE
        return [Free(quarantined)]
