"""Where the messenger plugs into the engine. The engine knows nothing of transport or peers.

Prefill role: the engine announces each step's chunks *before* the step runs, bumps its layer counter as layers finish,
and says when a step has ended. Decode role: sequences enter when their pages are there, and leave early when preempted.
All calls come from the engine's thread and must not block; one that raises is logged, except `step_started`, whose
exception fails the step. They may call the engine's own methods: those only queue.
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

    def step_finished(self, chunks: tuple[Chunk, ...]) -> None:
        """The step has run: all layers of `chunks` are in the cache. The jobs of `last` chunks have left the engine."""
        ...

    def job_failed(self, job_id: RequestId, error: Exception) -> None:
        """The step with a chunk of this job raised, or the engine closed; there is no `step_finished` for that step.

        The engine will not touch the job's pages again. The counter may have stopped short of the step's layers, and
        later steps move it on: nothing of the failed step may be concluded from it any more.
        """
        ...

    def job_cancelled(self, job_id: RequestId) -> None:
        """The answer to `Engine.cancel_job`, one for each call: the engine will never touch the job's pages again.

        So also for a job that has already finished or failed, or was never submitted. Never comes between a step's
        `step_started` and its end.
        """
        ...


class DecodeHooks(Protocol):
    def step_outputs(self, outputs: tuple[SequenceOutput, ...]) -> None:
        """What one step produced, for all of its sequences at once.

        A token that ended its request (end-of-sequence or one of `stop_token_ids`) is the last of `tokens`. When an
        output with a finish reason arrives, the sequence's pages are back in the pool.
        """
        ...

    def preempted(self, request: GenerationRequest, generated: tuple[int, ...]) -> None:
        """Pages ran out and this sequence gave its own up; recompute it from prompt + generated (decode role only).

        The engine has forgotten the request: it returns by `submit_ready(request, pages, generated)`.
        """
        ...
