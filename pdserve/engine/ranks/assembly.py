"""How the ranks of a node come together, as the leader sees it: stage by stage, each within its time."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self

from pdserve.engine.ranks.line import Kind, Line, Message
from pdserve.engine.ranks.member import NUMBER, SOCKET, RankTask
from pdserve.errors import ConfigError, RankLost
from pdserve.models.decoder import Decoder
from pdserve.parallel.gloo import GlooRanks, Spent

LOOK_S = 0.05
DESCRIPTORS = 2


class Stage(Enum):
    """What a rank is about to do."""

    COME = "come"
    WAIT = "wait for the others"
    JOIN = "join the group"
    LOAD = "load its part of the model"
    READY = "compute"


class OwnPart:
    """Rank 0 joins and loads on a thread, so that the leader sees meanwhile what becomes of the other ranks.

    A thread cannot be ended: after `close()`, it lets go of what it has when it gets there.
    """

    def __init__(self, task: RankTask) -> None:
        self.stage = Stage.JOIN
        self.model: Future[Decoder] = Future()
        self._task = task
        self._lock = threading.Lock()
        self._ranks: GlooRanks | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pdserve-rank-0-load", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            ranks = self._keep(self._task.join(0))
            self.stage = Stage.LOAD
            model = self._task.load(ranks)
            self.stage = Stage.READY
            self.model.set_result(model)
        except BaseException as error:
            self.model.set_exception(error)

    def _keep(self, ranks: GlooRanks) -> GlooRanks:
        with self._lock:
            if not self._closed:
                self._ranks = ranks
                return ranks
        ranks.close()
        raise RankLost("the node's start was given up")

    def spent(self) -> Spent:
        """On collectives, by this rank."""
        return Spent() if self._ranks is None else self._ranks.spent()

    def close(self) -> None:
        """Leaves the group. Idempotent."""
        with self._lock:
            self._closed, ranks, self._ranks = True, self._ranks, None
        if ranks is not None:
            ranks.close()


class Assembly:
    """The lines to the other ranks, and what came of them. `assemble()` ends when all ranks are ready.

    Raises RankLost, with the rank and the stage, ConfigError, and whatever stops the leader's own part (ModelError).
    """

    def __init__(self, task: RankTask) -> None:
        self.lines: dict[int, Line] = {}
        self._task = task
        self._unnamed: dict[int, Line] = {}
        self._ready: dict[int, Message] = {}
        self._own: OwnPart | None = None
        self._stages = dict.fromkeys(range(1, task.layout.ranks), Stage.COME)
        self._since_s = dict.fromkeys(self._stages, time.monotonic())

    def assemble(self) -> Decoder:
        """The leader's own part of the model."""
        with self._listener() as listener:
            while len(self.lines) < self._task.layout.ranks - 1:
                self._look(listener)
        self._enter(0, Stage.JOIN)
        for rank, line in self.lines.items():
            self._enter(rank, Stage.JOIN)
            try:
                line.send(Kind.JOIN)
            except OSError as error:
                raise self._ended(rank) from error
        self._own = OwnPart(self._task)
        while any(stage is not Stage.READY for stage in self._stages.values()):
            self._look(None)
            self._look_at_own(self._own)
        return self._own.model.result()

    def spent(self) -> Spent:
        return Spent() if self._own is None else self._own.spent()

    def take_fds(self, rank: int) -> tuple[int, ...]:
        """The descriptors of the rank's pages and of its layer counter; the caller's from then on."""
        return self._ready.pop(rank).fds

    # ------------------------------------------------ who says what

    @contextmanager
    def _listener(self) -> Iterator[socket.socket]:
        path = Path(self._task.folder) / SOCKET
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(str(path))
            except OSError as error:
                raise ConfigError(f"no socket {path} for the ranks: {error}; give a fresh, short folder") from error
            try:
                listener.listen(self._task.layout.ranks)
                yield listener
            finally:
                path.unlink(missing_ok=True)

    def _look(self, listener: socket.socket | None) -> None:
        """Hears whoever has something to say within LOOK_S."""
        named = {line.fileno(): rank for rank, line in self.lines.items()}
        poll = select.poll()
        for fd in (*named, *self._unnamed, *(() if listener is None else (listener.fileno(),))):
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(LOOK_S * 1000):
            if fd in named:
                self._hear(named[fd])
            elif fd in self._unnamed:
                self._hear_number(fd)
            elif listener is not None:
                line = Line(listener.accept()[0], self._task.timeout_s)
                self._unnamed[line.fileno()] = line
        self._check_time()

    def _hear_number(self, fd: int) -> None:
        """The first message of a process: which rank it is. One that leaves without is forgotten."""
        line, ranks = self._unnamed[fd], self._task.layout.ranks
        message = line.receive()
        if message is None:
            self._unnamed.pop(fd).close()
            return
        if message.kind is not Kind.WHO or len(message.data) != NUMBER.size:
            raise RankLost(f"process {line.process_id} did not say which rank it is, but {message.kind.name}")
        rank = NUMBER.unpack(message.data)[0]
        if not 1 <= rank < ranks:
            raise RankLost(
                f"process {line.process_id} came as rank {rank}; this node has ranks 1 to {ranks - 1} to come"
            )
        if rank in self.lines:
            first = self.lines[rank].process_id
            raise RankLost(f"rank {rank} came twice: process {first}, then process {line.process_id}")
        self.lines[rank] = self._unnamed.pop(fd)
        self._enter(rank, Stage.WAIT)

    def _hear(self, rank: int) -> None:
        message = self.lines[rank].receive(fds=True)
        if message is None:
            raise self._ended(rank)
        if message.kind is Kind.FAILED:
            raise RankLost(f"rank {rank} did not start: {message.text}")
        if message.kind is Kind.JOINED:
            self._enter(rank, Stage.LOAD)
        elif message.kind is Kind.READY and len(message.fds) == DESCRIPTORS:
            self._ready[rank] = message
            self._enter(rank, Stage.READY)
        else:
            message.close_fds()
            raise RankLost(
                f"rank {rank} sent {message.kind.name} with {len(message.fds)} descriptors; READY has {DESCRIPTORS}. "
                "If this process has too many files open, raise its limit (ulimit -n)"
            )

    def _look_at_own(self, own: OwnPart) -> None:
        if own.model.done():
            own.model.result()
        if own.stage is not self._stages[0]:
            self._enter(0, own.stage)

    # ------------------------------------------------ time

    def _enter(self, rank: int, stage: Stage) -> None:
        self._stages[rank] = stage
        self._since_s[rank] = time.monotonic()

    def _check_time(self) -> None:
        task, now_s = self._task, time.monotonic()
        limits_s = {Stage.COME: task.timeout_s, Stage.JOIN: task.timeout_s, Stage.LOAD: task.load_timeout_s}
        for stage, limit_s in limits_s.items():
            late = [
                rank for rank, its in self._stages.items() if its is stage and now_s - self._since_s[rank] > limit_s
            ]
            if late:
                others = [rank for rank in late if rank]  # the leader may only have waited for them
                raise RankLost(f"{self._names(others or late)} did not {stage.value} within {limit_s:g} s")

    def _names(self, ranks: list[int]) -> str:
        return ", ".join(f"rank {rank}{self._trouble(rank)}" for rank in ranks)

    def _trouble(self, rank: int) -> str:
        if rank not in self.lines:
            return " (the leader)" if rank == 0 else ""
        process_id, trouble = self.lines[rank].process_id, self.lines[rank].trouble
        return f" (process {process_id}{'' if trouble is None else f', which {trouble}'})"

    def _ended(self, rank: int) -> RankLost:
        process_id, stage = self.lines[rank].process_id, self._stages[rank].value
        return RankLost(f"rank {rank} (process {process_id}) has ended and did not {stage}")

    def close(self) -> None:
        """Ends the other ranks, and leaves the group. Idempotent."""
        for line in (*self.lines.values(), *self._unnamed.values()):
            line.end()
            line.close()
        for message in self._ready.values():
            message.close_fds()
        self._ready.clear()
        if self._own is not None:
            self._own.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
