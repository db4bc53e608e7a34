"""What the receiver keeps: a job per request, an entry per handoff, a trace per request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from pdserve.engine.stats import EngineLoad
from pdserve.messenger.handoff.decode import DecodeHandoff
from pdserve.messenger.wire import HandoffId, PrefillTimings
from pdserve.types import GenerationRequest, NodeId, PageIndex, RequestId
from transport.api import Imm, Immediates


class DecodeEngine(Protocol):
    """What the receiver asks of the engine."""

    def load(self) -> EngineLoad: ...

    def submit_ready(
        self, request: GenerationRequest, pages: tuple[PageIndex, ...], generated: tuple[int, ...] = ()
    ) -> None: ...

    def cancel(self, request_id: RequestId) -> None: ...


@dataclass(slots=True)
class Job:
    """One request, from its arrival until its last token. Owned by the receiver's thread."""

    request: GenerationRequest
    generated: tuple[int, ...]  # from before a preemption: part of what must be prefilled, not streamed again
    prefill: NodeId  # who computes it
    arrival: int  # its place in every queue, kept through failover and preemption
    handoff: HandoffId | None = None  # the attempt under way
    give_up_at: float | None = None  # set while it waits for pages
    attempts: int = 0
    tried: set[NodeId] = field(default_factory=set)
    delivered: bool = False
    cancelled: bool = False
    meeting: bool = False  # waits for its prefill node to be met
    reason: str = ""
    rerouting: bool = False  # another prefill node was asked for
    reroute_at: float | None = None  # when to ask again
    reroute_until: float | None = None  # set while its prefill node is lost
    only_there: bool = False  # no other prefill node will do

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens so far; the last one is the next decode step's input."""
        return self.request.prompt + self.generated


@dataclass(slots=True)
class TargetHandoff:
    """One attempt: the memory that is pinned for it, and how long to wait for the next answer."""

    id: HandoffId
    request_id: RequestId
    peer: NodeId
    pages: tuple[PageIndex, ...]
    imm: Imm
    tokens: tuple[int, ...]
    deadline: float
    machine: DecodeHandoff = field(default_factory=DecodeHandoff)
    armed: Immediates | None = None  # the table that counts it
    cancels: int = 0
    full_at: float = 0.0


@dataclass(frozen=True, slots=True)
class HandoffTrace:
    """One request's last handoff. Times are `time.monotonic()` seconds of D's host."""

    request_id: RequestId
    handoff: HandoffId
    prefill: NodeId
    provider: str
    attempt: int
    prompt_tokens: int
    requested_at: float
    writes_expected: int
    bytes_expected: int
    writes_counted: int = 0
    ready_at: float = 0.0
    writes_posted: int | None = None  # what P said in Done
    timings: PrefillTimings | None = None
