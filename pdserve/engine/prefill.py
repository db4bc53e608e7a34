"""The loop of a prefill engine: jobs chunk by chunk, as the scheduler shares each step. Nothing is sampled here."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from pdserve.engine.batch import BatchBuilder
from pdserve.engine.generation import Rank
from pdserve.engine.hooks import Chunk, PrefillHooks, PrefillJob
from pdserve.engine.scheduler import Span, plan_chunks
from pdserve.engine.sequence import JobProgress
from pdserve.errors import PdserveError
from pdserve.types import RequestId

_log = logging.getLogger(__name__)


class PrefillLoop:
    """All methods run on the engine's thread. `ended` tells the engine of each job that it may be forgotten."""

    def __init__(self, rank: Rank, hooks: PrefillHooks, ended: Callable[[RequestId], None]) -> None:
        self._rank = rank
        self._hooks = hooks
        self._ended = ended
        self._builder = BatchBuilder()
        self._jobs: deque[JobProgress] = deque()
        self._failures_in_a_row = 0
        self.queued_tokens = 0

    @property
    def running(self) -> int:
        """Jobs that have begun."""
        return sum(progress.computed_tokens > 0 for progress in self._jobs)

    @property
    def waiting(self) -> int:
        return len(self._jobs) - self.running

    def add(self, job: PrefillJob) -> None:
        progress = JobProgress.of(job)
        self._jobs.append(progress)
        self.queued_tokens += progress.target_tokens

    def cancel(self, job_id: RequestId) -> None:
        for progress in self._jobs:
            if progress.job.job_id == job_id:
                self._forget([progress])
                break
        self._guarded(partial(self._hooks.job_cancelled, job_id))

    def abort_all(self, reason: str) -> None:
        """The engine closes."""
        self._fail(list(self._jobs), PdserveError(reason))

    def step(self) -> bool:
        """One step, if there is a job."""
        if not self._jobs:
            return False
        started_s = time.perf_counter()
        spans = plan_chunks(list(self._jobs), self._rank.limits)
        try:
            model_s = self._run(spans)
        except Exception as error:
            self._failures_in_a_row += 1
            self._rank.stats.failed()
            _log.error(
                "a prefill step failed (%d in a row), its %d jobs end with an error: %s",
                self._failures_in_a_row,
                len(spans),
                error,
                exc_info=error,
            )
            self._fail([span.progress for span in spans], error)
            return True
        self._failures_in_a_row = 0
        computed = sum(span.end - span.start for span in spans)
        self._rank.stats.step(time.perf_counter() - started_s, model_s, prefill_tokens=computed, decode_tokens=0)
        return True

    def _run(self, spans: tuple[Span[JobProgress], ...]) -> float:
        """Announces, computes, and says that it is done; seconds in the model."""
        chunks = tuple(_chunk(span) for span in spans)
        batch = self._builder.build((), spans)
        self._hooks.step_started(chunks, int(self._rank.layer_counter[0]))
        before_s = time.perf_counter()
        self._rank.model.forward(batch, self._rank.memory, self._rank.layer_counter)
        model_s = time.perf_counter() - before_s
        for span in spans:
            span.progress.computed_tokens = span.end
            self.queued_tokens -= span.end - span.start
        self._forget([span.progress for span in spans if span.end == span.progress.target_tokens])
        self._guarded(partial(self._hooks.step_finished, chunks))
        return model_s

    def _forget(self, jobs: list[JobProgress]) -> None:
        for progress in jobs:
            self._jobs.remove(progress)
            self.queued_tokens -= progress.target_tokens - progress.computed_tokens
            self._ended(progress.job.job_id)

    def _fail(self, jobs: list[JobProgress], error: Exception) -> None:
        self._forget(jobs)
        for progress in jobs:
            self._guarded(partial(self._hooks.job_failed, progress.job.job_id, error))

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            _log.exception("an engine hook raised; the engine goes on")


def _chunk(span: Span[JobProgress]) -> Chunk:
    last = span.end == span.progress.target_tokens
    return Chunk(span.progress.job.job_id, span.start, span.end, last)
