"""The leader's side: starts with the other ranks, maps their memory, and steps them as if they were one model."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pdserve.attention.batch import RaggedBatch
from pdserve.engine.limits import page_geometry
from pdserve.engine.ranks.line import Line
from pdserve.engine.ranks.member import READY, SOCKET, WHO, Counter, RankTask
from pdserve.engine.ranks.rounds import Rounds
from pdserve.engine.ranks.steps import encode_step
from pdserve.errors import RankLost
from pdserve.kv.memory import KvMemory
from pdserve.models.api import ModelConfig
from pdserve.parallel.gloo import GlooRanks

_log = logging.getLogger(__name__)

WATCH_S = 0.2


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
    Raises RankLost, ModelError, ConfigError.
    """

    def __init__(self, task: RankTask) -> None:
        self.layout = task.layout
        self.lost: str | None = None
        self._lines: dict[int, Line] = {}
        self._rounds = Rounds(self._round, task.layout.dp) if task.layout.ep and task.layout.dp > 1 else None
        self._closing = threading.Event()
        self._stack = ExitStack()
        try:
            self._start(task)
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="pdserve-ranks", daemon=True)
        self._watcher.start()

    def _start(self, task: RankTask) -> None:
        self._accept(task)
        ranks = self._stack.enter_context(GlooRanks(task.layout, 0, task.rendezvous, task.timeout_s))
        self._model = task.load(ranks)
        self.config = self._model.config
        geometry = page_geometry(self.config, task.settings, task.layout.tp)
        self.memories = [self._stack.enter_context(KvMemory(geometry))]
        self._counters = [np.zeros(1, np.int64)]
        for rank in range(1, task.layout.ranks):
            memory_fd, counter_fd = self._ready(rank)
            self.memories.append(self._stack.enter_context(KvMemory(geometry, memory_fd)))
            counter = Counter(counter_fd)
            self._stack.callback(counter.close)
            if rank % task.layout.tp == 0:
                self._counters.append(counter.value)
        self.replicas = [ReplicaModel(self, number, value) for number, value in enumerate(self._counters)]

    def _accept(self, task: RankTask) -> None:
        deadline = time.monotonic() + task.timeout_s
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(Path(task.folder) / SOCKET))
            listener.listen(task.layout.ranks)
            while len(self._lines) < task.layout.ranks - 1:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connected, _ = listener.accept()
                except TimeoutError as error:
                    missing = sorted(set(range(1, task.layout.ranks)) - self._lines.keys())
                    raise RankLost(f"ranks {missing} did not come within {task.timeout_s:g} s") from error
                connected.settimeout(None)
                line = Line(connected)
                self._stack.callback(line.close)
                if (who := line.receive()) is not None:
                    self._lines[WHO.unpack(who)[0]] = line

    def _ready(self, rank: int) -> list[int]:
        """The rank's descriptors: its pages, its layer counter."""
        message, fds = self._lines[rank].receive_fds(2)
        if message == READY:
            return fds
        raise RankLost(f"rank {rank} did not start: {'it has ended' if message is None else message[1:].decode()}")

    # ------------------------------------------------ steps

    def forward(self, replica: int, batch: RaggedBatch) -> NDArray[np.float32]:
        """One step of a replica; with experts shared by several replicas, of all of them. Raises RankLost."""
        if self._rounds is not None:
            return self._rounds.step(replica, batch)
        return self._round({replica: batch})[replica]

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
            self.lose(f"a step did not end on all ranks: {error}")
            raise
        return logits

    def _tell(self, replica: int, message: bytes) -> None:
        tp = self.layout.tp
        for rank in range(max(1, replica * tp), (replica + 1) * tp):
            self._lines[rank].send(message)

    def _logits(self, replica: int, batch: RaggedBatch) -> NDArray[np.float32]:
        if replica == 0:
            return self._model.forward(batch, self.memories[0], self._counters[0])
        rank = replica * self.layout.tp
        answer = self._lines[rank].receive()
        if answer is None:
            raise RankLost(f"rank {rank} has ended")
        return np.frombuffer(bytearray(answer), np.float32).reshape(-1, self.config.vocab)

    # ------------------------------------------------ the others' lives

    def lose(self, reason: str) -> None:
        if self.lost is None and not self._closing.is_set():
            self.lost = reason
            _log.error("this node has lost a rank: %s", reason)
        for line in list(self._lines.values()):
            line.end()

    def _watch(self) -> None:
        poll = select.poll()
        ranks = {line.fileno(): rank for rank, line in self._lines.items()}
        for fd in ranks:
            poll.register(fd, select.POLLRDHUP)
        while not self._closing.is_set() and self.lost is None:
            for fd, _ in poll.poll(WATCH_S * 1000):
                self.lose(f"rank {ranks[fd]} has ended")
                return

    def close(self) -> None:
        """Ends the other ranks; after the engines were closed. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        for line in self._lines.values():
            line.end()
        if hasattr(self, "_watcher"):
            self._watcher.join()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
