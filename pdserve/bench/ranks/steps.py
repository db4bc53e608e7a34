"""Decode steps by one rank and by two, in rounds that alternate."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from pdserve.attention.batch import RaggedBatch
from pdserve.config import EngineSettings
from pdserve.engine.limits import page_geometry
from pdserve.engine.ranks.leader import NodeRanks
from pdserve.engine.ranks.local import start_member
from pdserve.engine.ranks.member import RankTask
from pdserve.kv.memory import KvMemory
from pdserve.models.load import load_model
from pdserve.parallel.gloo import RankLayout

END_S = 10.0
PAGE_TOKENS = 32
WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """`steps` steps of each batch size make a part of a round. `cores`: of the leader, of the other rank; or none."""

    model: Path
    dtype: str = "bf16"
    rounds: int = 9
    steps: int = 20
    batches: tuple[int, ...] = (1, 8)
    context_tokens: int = 128
    cores: tuple[int | None, int | None] = (None, None)

    @property
    def settings(self) -> EngineSettings:
        pages = max(self.batches) * self.pages_each + 8
        return EngineSettings.model_validate(
            {"dtype": self.dtype, "page_size": PAGE_TOKENS, "chunk_tokens": PAGE_TOKENS,
             "max_batch": max(self.batches), "kv_cache_tokens": pages * PAGE_TOKENS}
        )  # fmt: skip

    @property
    def pages_each(self) -> int:
        return self.context_tokens // PAGE_TOKENS + 1

    def batch(self, sequences: int) -> RaggedBatch:
        """One decode row each, every sequence `context_tokens` long."""
        return RaggedBatch(
            tokens=np.arange(sequences, dtype=np.int64) + 2,
            row_start=np.arange(sequences + 1, dtype=np.int64),
            first_position=np.full(sequences, self.context_tokens, np.int64),
            page_table=np.arange(sequences * self.pages_each, dtype=np.int64).reshape(sequences, self.pages_each),
            logit_rows=np.arange(sequences, dtype=np.int64),
        )


@dataclass(frozen=True, slots=True)
class Round:
    """Of one batch size; seconds of a step, and what of it the leader spent in collectives."""

    one_s: float
    two_s: float
    gloo_s: float
    collectives: float


@dataclass(frozen=True, slots=True)
class Systems:
    """One step of a batch each; `ranks` is behind `two`."""

    one: Callable[[RaggedBatch], object]
    two: Callable[[RaggedBatch], object]
    ranks: NodeRanks


@contextmanager
def systems_of(plan: Plan) -> Iterator[Systems]:
    """The same model by one rank, here, and by two. Raises ModelError, RankLost, ConfigError."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-bench-"))
        task = RankTask(folder, RankLayout(tp=2), str(plan.model), plan.settings)
        other = start_member(task, 1, plan.cores[1])
        stack.callback(_end, other)
        ranks = stack.enter_context(NodeRanks(task))
        model = load_model(plan.model, plan.settings.dtype)
        memory = stack.enter_context(KvMemory(page_geometry(model.config, plan.settings)))
        counter = np.zeros(1, np.int64)
        yield Systems(
            one=lambda batch: model.forward(batch, memory, counter),
            two=lambda batch: ranks.forward(0, batch),
            ranks=ranks,
        )


def measure_steps(plan: Plan, systems: Systems, before_round: Callable[[], None]) -> dict[int, list[Round]]:
    """By batch size."""
    batches = {size: plan.batch(size) for size in plan.batches}
    for batch in batches.values():
        for _ in range(WARM_UP):
            systems.one(batch)
            systems.two(batch)
    rounds: dict[int, list[Round]] = {size: [] for size in batches}
    for _ in range(plan.rounds):
        before_round()
        for size, batch in batches.items():
            rounds[size].append(_round(plan, systems, batch))
    return rounds


def _round(plan: Plan, systems: Systems, batch: RaggedBatch) -> Round:
    one_s = median(_seconds(systems.one, batch) for _ in range(plan.steps))
    two_s, gloo_s = [], []
    before = systems.ranks.spent()
    for _ in range(plan.steps):
        begun = systems.ranks.spent()
        two_s.append(_seconds(systems.two, batch))
        gloo_s.append(systems.ranks.spent().seconds - begun.seconds)
    collectives = systems.ranks.spent().collectives - before.collectives
    return Round(one_s, median(two_s), median(gloo_s), collectives / plan.steps)


def _seconds(step: Callable[[RaggedBatch], object], batch: RaggedBatch) -> float:
    begun_s = time.perf_counter()
    step(batch)
    return time.perf_counter() - begun_s


def _end(process: subprocess.Popen[bytes]) -> None:
    """It ends by itself once its leader has; what does not is killed."""
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
