"""What an engine says of itself: its load now, for the scheduler, and its totals, for metrics."""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass, field, replace

STEP_SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    running: int  # sequences or jobs that have begun
    waiting: int
    queued_prefill_tokens: int  # prompt tokens that are still to be computed
    free_pages: int
    quarantined_pages: int
    total_pages: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the start. `step_buckets[i]` counts steps up to `STEP_SECONDS_BOUNDS[i]`; the last, longer ones."""

    steps: int = 0
    failed_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    step_s: float = 0.0  # whole steps
    model_s: float = 0.0  # the forward passes in them
    step_buckets: tuple[int, ...] = (0,) * (len(STEP_SECONDS_BOUNDS) + 1)


@dataclass(slots=True)
class StatsRecorder:
    """Written by the engine's thread, read from any."""

    _stats: EngineStats = field(default_factory=EngineStats)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def step(self, step_s: float, model_s: float, *, prefill_tokens: int, decode_tokens: int) -> None:
        with self._lock:
            old = self._stats
            buckets = list(old.step_buckets)
            buckets[bisect_left(STEP_SECONDS_BOUNDS, step_s)] += 1
            self._stats = replace(
                old,
                steps=old.steps + 1,
                prefill_tokens=old.prefill_tokens + prefill_tokens,
                decode_tokens=old.decode_tokens + decode_tokens,
                step_s=old.step_s + step_s,
                model_s=old.model_s + model_s,
                step_buckets=tuple(buckets),
            )

    def preempted(self, sequences: int) -> None:
        with self._lock:
            self._stats = replace(self._stats, preemptions=self._stats.preemptions + sequences)

    def failed(self) -> None:
        with self._lock:
            self._stats = replace(self._stats, failed_steps=self._stats.failed_steps + 1)

    def snapshot(self) -> EngineStats:
        return self._stats
