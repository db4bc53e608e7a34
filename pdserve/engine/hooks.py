"""Where the messenger plugs into the engine. The engine knows nothing of transport or peers.

Prefill role: the engine announces each step's chunks *before* the step runs, bumps `LayerCounter` as layers finish, and
says when a step has ended. Decode role: sequences enter when their pages are there, and leave early when preempted.
All calls come from the engine's thread and must not block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pdserve.types import GenerationRequest, PageIndex, RequestId, SequenceOutput


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """A prompt to compute into pages: `tokens` is the prompt *without* its last token.

    `pages` were allotted by whoever submits the job, are as many as the tokens need, and stay its property: the
    engine writes into them and never frees them.
    """

    job_id: RequestId
    tokens: tuple[int, ...]
    pages: tuple[PageIndex, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start:end` of a job, computed in one step. `start` lies on a page border; `last` closes the job."""

    job_id: RequestId
    start: int
    end: int
    last: bool


class PrefillHooks(Protocol):
    def step_started(self, chunks: tuple[Chunk, ...], counter_base: int) -> None:
        """The step is about to run: layer l of `chunks` is in the cache once the counter exceeds `counter_base + l`."""
        ...

    def step_finished(self, chunks: tuple[Chunk, ...]) -> None: ...

    def job_failed(self, job_id: RequestId, error: Exception) -> None: ...


class DecodeHooks(Protocol):
    def step_outputs(self, outputs: tuple[SequenceOutput, ...]) -> None:
        """What one step produced, for all of its sequences at once."""
        ...

    def preempted(self, request: GenerationRequest, generated: tuple[int, ...]) -> None:
        """Pages ran out and this sequence gave its own up; recompute it from prompt + generated (decode role only)."""
        ...
