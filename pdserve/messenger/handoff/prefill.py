"""The prefill node's side of a handoff, as a pure state machine.

queued → running → draining → done; from any: cancelling → quiesced.
Source pages are freed only when no write of the handoff is in flight and the engine will not touch them again. A stop
is answered as soon as nothing is in flight: D need not wait for the step that the engine may be in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class PrefillState(StrEnum):
    QUEUED = "queued"  # waiting for pages or for the engine
    RUNNING = "running"
    DRAINING = "draining"  # computed; writes in flight
    DONE = "done"
    CANCELLING = "cancelling"  # posting has stopped; writes in flight, or (answered already) the engine still at work
    QUIESCED = "quiesced"


@dataclass(frozen=True, slots=True)
class SourcePagesAllotted:
    pass


@dataclass(frozen=True, slots=True)
class LayersComputed:
    """`transfers` layer writes could be posted now."""

    transfers: int


@dataclass(frozen=True, slots=True)
class PrefillComputed:
    """The last chunk's step has ended; the engine will not touch the pages again."""


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A transfer is done: it posted `posted` writes; `error` unless all of them completed."""

    posted: int
    error: str | None


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Cancel from D, a deadline, D's death (`answer` False: nobody to tell), or an engine fault."""

    reason: str
    answer: bool = True


@dataclass(frozen=True, slots=True)
class EngineLetGo:
    """The engine will not touch the pages again (after StopJob, or because the job failed)."""


PrefillEvent = SourcePagesAllotted | LayersComputed | PrefillComputed | TransferEnded | StopAsked | EngineLetGo


@dataclass(frozen=True, slots=True)
class SubmitJob:
    pass


@dataclass(frozen=True, slots=True)
class PostLayers:
    pass


@dataclass(frozen=True, slots=True)
class StopJob:
    """Drop it from the engine; `EngineLetGo` follows."""


@dataclass(frozen=True, slots=True)
class StopTransfers:
    """Post nothing more of what was submitted; `TransferEnded` follows for each."""


@dataclass(frozen=True, slots=True)
class FreeSourcePages:
    pass


@dataclass(frozen=True, slots=True)
class SendDone:
    posted: int


@dataclass(frozen=True, slots=True)
class SendQuiesced:
    posted: int
    reason: str


PrefillInstruction = SubmitJob | PostLayers | StopJob | StopTransfers | FreeSourcePages | SendDone | SendQuiesced


@dataclass(slots=True)
class PrefillHandoff:
    """One handoff at the prefill node."""

    state: PrefillState = PrefillState.QUEUED
    posted: int = 0  # writes, over all ended transfers
    in_flight: int = 0  # transfers submitted and not ended
    reason: str = ""
    _pages: bool = field(default=False, repr=False)  # source pages are ours
    _engine: bool = field(default=False, repr=False)  # the engine may touch them
    _answer: bool = field(default=True, repr=False)  # Quiesced is still owed

    @property
    def ended(self) -> bool:
        return self.state in (PrefillState.DONE, PrefillState.QUIESCED)

    def handle(self, event: PrefillEvent) -> Sequence[PrefillInstruction]:
        """Takes one event; returns what to do, in this order. An event that no longer matters yields nothing."""
        match event:
            case SourcePagesAllotted():
                assert self.state is PrefillState.QUEUED and not self._pages
                self._pages = self._engine = True
                return [SubmitJob()]
            case LayersComputed(transfers) if self.state in (PrefillState.QUEUED, PrefillState.RUNNING):
                self.state = PrefillState.RUNNING
                self.in_flight += transfers
                return [PostLayers()] if transfers else []
            case PrefillComputed():
                self._engine = False
                if self.state in (PrefillState.QUEUED, PrefillState.RUNNING):
                    self.state = PrefillState.DRAINING
                return self._end_if_drained()
            case TransferEnded(posted, error):
                return self._transfer_ended(posted, error)
            case StopAsked(reason, answer):
                return self._stop(reason, answer)
            case EngineLetGo():
                self._engine = False
                return self._end_if_drained()
        return []

    def _transfer_ended(self, posted: int, error: str | None) -> Sequence[PrefillInstruction]:
        self.in_flight -= 1
        self.posted += posted
        if error is not None and self.state is not PrefillState.CANCELLING:
            return self._stop(error, answer=True)
        return self._end_if_drained()

    def _stop(self, reason: str, answer: bool) -> Sequence[PrefillInstruction]:
        self._answer = self._answer and answer
        if self.ended or self.state is PrefillState.CANCELLING:
            return []
        self.state, self.reason = PrefillState.CANCELLING, reason
        stop: list[PrefillInstruction] = [StopJob()] if self._engine else []
        if self.in_flight:
            stop.append(StopTransfers())
        return [*stop, *self._end_if_drained()]

    def _end_if_drained(self) -> Sequence[PrefillInstruction]:
        if self.in_flight or self.state not in (PrefillState.DRAINING, PrefillState.CANCELLING):
            return []
        if self.state is PrefillState.DRAINING:
            self.state = PrefillState.DONE
            return [*self._free(), SendDone(self.posted)]
        answer = [SendQuiesced(self.posted, self.reason)] if self._answer else []
        self._answer = False
        if self._engine:
            return answer
        self.state = PrefillState.QUIESCED
        return [*self._free(), *answer]

    def _free(self) -> Sequence[PrefillInstruction]:
        held, self._pages = self._pages, False
        return [FreeSourcePages()] if held else []
