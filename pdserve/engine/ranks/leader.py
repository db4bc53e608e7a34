"""The leader's side: starts with the other ranks, maps their memory, and steps them as if they were one model."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pdserve.attention.batch import RaggedBatch
from pdserve.engine.limits import page_geometry
from pdserve.engine.ranks.assembly import Assembly
from pdserve.engine.ranks.line import HangUps, Kind
from pdserve.engine.ranks.member import Counter, RankTask
from pdserve.engine.ranks.rounds import Rounds
from pdserve.engine.ranks.steps import counter_for, encode_step
from pdserve.errors import RankLost
from pdserve.kv.memory import KvMemory
from pdserve.models.api import ModelConfig
from pdserve.parallel.gloo import Spent
from policies.layout import PageGeometry

_log = logging.getLogger(__name__)

LAST_WORDS_S = 1.0


class ReplicaModel:
    """Implements `Model`: one engine replica, whichever ranks compute it.

    `layer_counter` is bumped by the replica's first rank; where that is not the leader, an engine must watch this one.
    """

    def __init__(self, ranks: NodeRanks, number: int, layer_counter: NDArray[np.int64]) -> None:
        self.config: ModelConfig = ranks.config
        self.layer_counter = layer_counter
        self._ranks = ranks
        self._number = number

    def forward(self, batch: RaggedBatch, cache: KvMemory, layer_counter: NDArray[np.int64]) -> NDArray[np.float32]:
        assert layer_counter is self.layer_counter
        return self._ranks.forward(self._number, batch)


class NodeRanks:
    """All ranks of a node, at its leader. `memories`: of all ranks, in order, mapped here.

    Waits for the other ranks, which someone else starts with the same task (`run_member`). A rank that is lost, or a
    step that did not end on all ranks, leaves the node useless: `lost` says why from then on, and no step is begun.
    `on_lost` is then called with the reason: once, from any thread, not while the node starts or closes.
    After a start that failed, end the process: what rank 0 was busy with may go on for a while.
    Raises RankLost, ModelError, ConfigError.
    """

    def __init__(self, task: RankTask, on_lost: Callable[[str], None] | None = None) -> None:
        self.layout = task.layout
        self.lost: str | None = None
        self._step_timeout_s = task.step_timeout_s
        self._on_lost = on_lost
        self._rounds = Rounds(self._round, task.layout.dp) if task.layout.ep and task.layout.dp > 1 else None
        self._losing = threading.Lock()
        self._closing = False
        self._stack = ExitStack()
        try:
            self._start(task)
        except BaseException:
            self.close()
            raise

    def _start(self, task: RankTask) -> None:
        self._assembly = assembly = self._stack.enter_context(Assembly(task))
        self._lines = assembly.lines
        self._model = assembly.assemble()
        self.config = self._model.config
        geometry = page_geometry(self.config, task.settings, task.layout.tp)
        self.memories = [self._stack.enter_context(KvMemory(geometry))]
        self._counters = [np.zeros(1, np.int64)]
        for rank in range(1, task.layout.ranks):
            self._map(rank, geometry, assembly.take_fds(rank))
        self.replicas = [ReplicaModel(self, number, value) for number, value in enumerate(self._counters)]
        for line in self._lines.values():
            line.limit(task.step_timeout_s)
        self._watch_lines()

    def _map(self, rank: int, geometry: PageGeometry, fds: tuple[int, ...]) -> None:
        """Owns the descriptors."""
        memory_fd, counter_fd = fds
        with ExitStack() as unmapped:
            for fd in fds:
                unmapped.callback(os.close, fd)
            try:
                memory, counter = KvMemory(geometry, memory_fd), Counter(counter_fd)
            except ValueError as error:
                raise RankLost(f"rank {rank} was started with another task: {error}") from error
            unmapped.pop_all()
        self.memories.append(self._stack.enter_context(memory))
        self._stack.callback(counter.close)
        if rank % self.layout.tp == 0:
            self._counters.append(counter.value)

    def _watch_lines(self) -> None:
        hang_ups = HangUps(self._lines.values())
        self._stack.callback(hang_ups.close)
        watcher = threading.Thread(target=self._watch, args=(hang_ups,), name="pdserve-ranks", daemon=True)
        watcher.start()
        self._stack.callback(lambda: None if watcher is threading.current_thread() else watcher.join())
        self._stack.callback(hang_ups.stop)

    # ------------------------------------------------ steps

    def forward(self, replica: int, batch: RaggedBatch) -> NDArray[np.float32]:
        """One step of a replica; with experts shared by several replicas, of all of them. Raises RankLost."""
        if self._rounds is not None:
            return self._rounds.step(replica, batch)
        return self._round({replica: batch})[replica]

    def spent(self) -> Spent:
        """What collectives have cost the leader so far."""
        return self._assembly.spent()

    def _round(self, batches: dict[int, RaggedBatch]) -> dict[int, NDArray[np.float32]]:
        """One step of some replicas together."""
        if self.lost is not None:
            raise RankLost(self.lost)
        messages = {replica: encode_step(batch) for replica, batch in batches.items()}
        logits = {}
        try:
            for replica, message in messages.items():
                self._tell(replica, message)
            for replica in sorted(batches):  # the leader's own first: the others then wait for nobody
                logits[replica] = self._logits(replica, batches[replica])
        except Exception as error:  # some ranks are in this step, others are not
            fault = self._fault()
            self.lose(f"a step did not end on all ranks: {error}" if fault is None else fault)
            raise
        return logits

    def _tell(self, replica: int, message: bytes) -> None:
        tp = self.layout.tp
        for rank in range(max(1, replica * tp), (replica + 1) * tp):
            try:
                self._lines[rank].send(Kind.STEP, message)
            except TimeoutError:
                raise self._silent(rank, "take") from None
            except OSError as error:
                raise RankLost(f"rank {rank} has ended: {error}") from error

    def _logits(self, replica: int, batch: RaggedBatch) -> NDArray[np.float32]:
        if replica == 0:
            return self._model.forward(batch, self.memories[0], counter_for(batch, self._counters[0]))
        rank = replica * self.layout.tp
        try:
            answer = self._lines[rank].receive()
        except TimeoutError:
            raise self._silent(rank, "answer") from None
        if answer is None:
            raise RankLost(self.lost or f"rank {rank} has ended")
        if answer.kind is Kind.FAILED:
            raise RankLost(f"rank {rank} failed: {answer.text}")
        assert answer.kind is Kind.LOGITS
        return np.frombuffer(answer.data, np.float32).reshape(-1, self.config.vocab)

    def _silent(self, rank: int, what: str) -> RankLost:
        return RankLost(f"rank {rank} did not {what} a step within {self._step_timeout_s:g} s")

    # ------------------------------------------------ the others' lives

    def lose(self, reason: str) -> None:
        """Ends the other ranks: the node is of no use any more. The first reason stays."""
        with self._losing:
            first = self.lost is None and not self._closing
            if first:
                self.lost = reason
        for line in list(self._lines.values()):
            line.end()
        if not first:
            return
        _log.error("this node has lost a rank: %s", reason)
        if self._on_lost is not None:
            try:
                self._on_lost(reason)
            except Exception:
                _log.exception("what was to be done about the lost rank raised")

    def _fault(self) -> str | None:
        """Whose fault it is that a step did not end, as far as it shows.

        That of a rank that says so, or whose process has ended or is stopped; not of one that waited for it in vain.
        """
        waited = []
        for rank, line in self._lines.items():
            words = line.last_words(LAST_WORDS_S)
            if words is not None and not words.startswith(RankLost.__name__):
                return f"rank {rank} failed: {words}"
            if words is not None:
                waited.append(rank)
        for rank, line in self._lines.items():
            if rank not in waited and line.trouble is not None:
                return f"rank {rank} (process {line.process_id}) {line.trouble}"
        return None

    def _watch(self, hang_ups: HangUps) -> None:
        gone = hang_ups.wait()
        if gone is None or self._closing or self.lost is not None:
            return
        rank = next(rank for rank, line in self._lines.items() if line is gone)
        self.lose(self._fault() or f"rank {rank} (process {gone.process_id}) has ended")

    def close(self) -> None:
        """Ends the other ranks; after the engines were closed. Idempotent."""
        with self._losing:
            if self._closing:
                return
            self._closing = True
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
