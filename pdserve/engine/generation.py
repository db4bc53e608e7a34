"""The generating loop of a decode or colocated engine: sequences, their pages, one step after another."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.batch import BatchBuilder
from pdserve.engine.hooks import DecodeHooks
from pdserve.engine.sampler import NO_TOKEN, Sampler
from pdserve.engine.scheduler import Limits, StepPlan, plan_step
from pdserve.engine.sequence import Sequence
from pdserve.engine.stats import StatsRecorder
from pdserve.errors import OutOfPages
from pdserve.kv.memory import KvMemory
from pdserve.kv.pool import PagePool
from pdserve.models.api import Model
from pdserve.types import FinishReason, PageIndex, RequestId, Role, SequenceOutput

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rank:
    """What a loop computes with."""

    model: Model
    memory: KvMemory
    layer_counter: NDArray[np.int64]
    limits: Limits
    stats: StatsRecorder


class GenerationLoop:
    """All methods run on the engine's thread. `ended` tells the engine of each request that it may be forgotten."""

    def __init__(
        self, rank: Rank, pool: PagePool, hooks: DecodeHooks, role: Role, ended: Callable[[RequestId], None]
    ) -> None:
        self._rank = rank
        self._pool = pool
        self._hooks = hooks
        self._recomputes = role is Role.COLOCATED
        self._ended = ended
        self._builder = BatchBuilder()
        self._sampler = Sampler(rank.model.config.vocab)
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._aborted: list[SequenceOutput] = []
        self._failures_in_a_row = 0
        self.queued_tokens = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)
        self.queued_tokens += sequence.queued_tokens

    def cancel(self, request_id: RequestId) -> None:
        """Ends the sequence, wherever it is; nothing for one that is not here (any more)."""
        for sequence in (*self._running, *self._waiting):
            if sequence.id == request_id:
                self._remove([sequence])
                self._aborted.append(SequenceOutput(request_id, (), FinishReason.ABORT))
                return

    def abort_all(self, reason: str) -> None:
        """The engine closes."""
        live = [*self._running, *self._waiting]
        self._remove(live)
        self._aborted += [SequenceOutput(sequence.id, (), FinishReason.ABORT, reason) for sequence in live]
        self._report_aborted()

    def step(self) -> bool:
        """One step, if any sequence can run now."""
        self._report_aborted()
        if not self._running and not self._waiting:
            return False
        started_s = time.perf_counter()
        plan: StepPlan[Sequence] | None = None
        try:
            plan = self._plan()
            if not plan.decode and not plan.chunks:
                return False
            model_s, outputs = self._run(plan)
        except Exception as error:
            self._fail([*self._running, *self._waiting] if plan is None else self._of(plan), error)
            return True
        self._failures_in_a_row = 0
        self._rank.stats.step(
            time.perf_counter() - started_s,
            model_s,
            prefill_tokens=sum(span.end - span.start for span in plan.chunks),
            decode_tokens=len(plan.decode),
        )
        self._report(outputs)
        return True

    # -- one step ------------------------------------------------------------------------------------------------

    def _plan(self) -> StepPlan[Sequence]:
        """A plan with its pages in place. Others draw on the pool too: what they took is planned without."""
        free = self._pool.free_pages
        while True:
            plan = plan_step(self._running, self._waiting, free, self._rank.limits)
            try:
                fresh = self._pool.allocate(plan.pages_from_pool)
            except OutOfPages:
                free = min(free - 1, self._pool.free_pages)
                continue
            self._carry_out(plan, fresh)
            return plan

    def _carry_out(self, plan: StepPlan[Sequence], fresh: tuple[PageIndex, ...]) -> None:
        """Moves pages and sequences. The victims' pages go to those that grow without a stop in the pool."""
        supply = list(fresh)
        for victim in plan.preempt:
            supply += self._give_up(victim)
        for _ in plan.admit:
            self._waiting.popleft()
        self._running += plan.admit
        for sequence, pages in plan.grow:
            if pages:
                sequence.add_pages(supply[:pages])
                del supply[:pages]
        if plan.preempt:
            self._settle(plan.preempt, supply)
        assert plan.preempt or not supply

    def _give_up(self, victim: Sequence) -> list[PageIndex]:
        if victim in self._running:
            self._running.remove(victim)
        else:
            self._waiting.remove(victim)
        self.queued_tokens -= victim.queued_tokens
        pages = victim.take_pages()
        if self._recomputes:  # victims come newest first, so that the queue's order is kept
            self._waiting.appendleft(victim)
            self.queued_tokens += victim.queued_tokens
        return pages

    def _settle(self, victims: tuple[Sequence, ...], left_over: list[PageIndex]) -> None:
        self._rank.stats.preempted(len(victims))
        self._pool.free(left_over)
        if self._recomputes:
            return
        for victim in reversed(victims):
            self._ended(victim.id)
            self._guarded(partial(self._hooks.preempted, victim.request, victim.generated))

    def _run(self, plan: StepPlan[Sequence]) -> tuple[float, list[SequenceOutput]]:
        """Seconds in the model, and what came out. Changes no sequence before all that may raise is behind."""
        batch = self._builder.build(plan.decode, plan.chunks)
        before_s = time.perf_counter()
        logits = self._rank.model.forward(batch, self._rank.memory, self._rank.layer_counter)
        model_s = time.perf_counter() - before_s
        tokens = self._sampler.sample(logits, plan.decode) if plan.decode else []
        for span in plan.chunks:
            span.progress.computed_tokens = span.end
            self.queued_tokens -= span.end - span.start
        outputs = []
        done = []
        for sequence, token in zip(plan.decode, tokens, strict=True):
            output = _advance(sequence, token)
            outputs.append(output)
            if output.finish is not None:
                done.append(sequence)
        if done:
            self._remove(done)
        return model_s, outputs

    # -- endings -------------------------------------------------------------------------------------------------

    def _remove(self, sequences: list[Sequence]) -> None:
        """Forgets them; their pages are in the pool before anybody hears of it."""
        gone = set(map(id, sequences))
        self._running = [sequence for sequence in self._running if id(sequence) not in gone]
        if any(id(sequence) in gone for sequence in self._waiting):
            self._waiting = deque(sequence for sequence in self._waiting if id(sequence) not in gone)
        for sequence in sequences:
            self.queued_tokens -= sequence.queued_tokens
            self._ended(sequence.id)
            self._pool.free(sequence.take_pages())

    def _of(self, plan: StepPlan[Sequence]) -> list[Sequence]:
        return [*plan.decode, *(span.progress for span in plan.chunks)]

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        self._failures_in_a_row += 1
        self._rank.stats.failed()
        _log.error(
            "an engine step failed (%d in a row), its %d requests end with an error: %s",
            self._failures_in_a_row,
            len(sequences),
            error,
            exc_info=error,
        )
        self._remove(sequences)
        message = f"the engine step that ran this request failed: {type(error).__name__}: {error}"
        self._report([SequenceOutput(sequence.id, (), FinishReason.ERROR, message) for sequence in sequences])

    def _report_aborted(self) -> None:
        if self._aborted:
            outputs, self._aborted = self._aborted, []
            self._report(outputs)

    def _report(self, outputs: Iterable[SequenceOutput]) -> None:
        reported = tuple(outputs)
        if reported:
            self._guarded(partial(self._hooks.step_outputs, reported))

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            _log.exception("an engine hook raised; the engine goes on")


def _advance(sequence: Sequence, token: int) -> SequenceOutput:
    if token == NO_TOKEN:
        message = f"the model's logits at position {sequence.known_tokens - 1} are not finite"
        return SequenceOutput(sequence.id, (), FinishReason.ERROR, message)
    return SequenceOutput(sequence.id, (token,), sequence.append(token))
