"""A rank that is not the leader: computes what the leader tells it, and ends with it."""

from __future__ import annotations

import logging
import mmap
import os
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pdserve.config import EngineSettings
from pdserve.engine.limits import page_geometry
from pdserve.engine.ranks.line import HangUps, Kind, Line
from pdserve.engine.ranks.steps import counter_for, decode_step
from pdserve.errors import RankLost
from pdserve.kv.memory import KvMemory
from pdserve.models.decoder import Decoder
from pdserve.models.load import load_rank
from pdserve.parallel.gloo import GlooRanks, RankLayout

_log = logging.getLogger(__name__)

NUMBER = struct.Struct("<I")
SOCKET, MEETING = "leader", "meeting"
PATIENCE_S = 2.0
LEAVE_S = 2.0
"""What a rank has to end by itself once its leader is gone."""


@dataclass(frozen=True, slots=True)
class RankTask:
    """What all ranks of a node are told. `folder`: a fresh one on their host, for the socket and the rendezvous."""

    folder: str
    layout: RankLayout
    model_path: str
    settings: EngineSettings
    timeout_s: float = 60.0  # for all ranks to come, and then to join the group
    load_timeout_s: float = 600.0  # for a rank to load its part of the model
    step_timeout_s: float = 60.0  # for one collective, and for an answer to a step

    @property
    def rendezvous(self) -> str:
        return f"file://{self.folder}/{MEETING}"

    def join(self, rank: int) -> GlooRanks:
        """Raises RankLost; later than the leader does, who knows which rank did not come."""
        return GlooRanks(self.layout, rank, self.rendezvous, self.timeout_s + PATIENCE_S, self.step_timeout_s)

    def load(self, ranks: GlooRanks) -> Decoder:
        settings = self.settings
        return load_rank(self.model_path, settings.dtype, ranks.parallel, deterministic=settings.deterministic)


class Counter:
    """A layer counter `(1,) int64` over a memfd, which another process may map. With `fd` it is such a mapping."""

    def __init__(self, fd: int | None = None) -> None:
        """Raises OSError, ValueError where the descriptor is of no use; it is the caller's then."""
        created = os.memfd_create("pdserve-layers", os.MFD_CLOEXEC) if fd is None else fd
        try:
            if fd is None:
                os.ftruncate(created, 8)
            self.value: NDArray[np.int64] = np.frombuffer(mmap.mmap(created, 8), np.int64)
        except BaseException:
            if fd is None:
                os.close(created)
            raise
        self.fd = created

    def close(self) -> None:
        """Lets go of the memory; it is unmapped once the last user of `value` is gone."""
        self.value = np.zeros(1, np.int64)
        os.close(self.fd)


class _LeaderLife:
    """Ends this process when the leader is gone and this rank, busy with something else, does not end by itself."""

    def __init__(self, line: Line) -> None:
        self._hang_ups = HangUps([line])
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pdserve-rank-leader", daemon=True)

    def _watch(self) -> None:
        if self._hang_ups.wait() is not None and not self._left.wait(LEAVE_S):
            _log.error("the leader is gone, and this rank did not end within %g s: ending the process", LEAVE_S)
            os._exit(1)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._hang_ups.stop()
        self._thread.join()
        self._hang_ups.close()


def run_member(task: RankTask, rank: int) -> None:
    """Until the leader ends it, or is gone. Raises what stops this rank; the leader has heard of it by then.

    A leader that is gone ends the process, where the rank is in something that does not end with the leader.
    """
    with ExitStack() as stack:
        line = Line(_connect(task))
        stack.callback(line.close)
        stack.enter_context(_LeaderLife(line))
        try:
            line.send(Kind.WHO, NUMBER.pack(rank))
            if line.receive() is not None:  # all are here
                _take_part(task, rank, line, stack)
        except Exception as error:
            with suppress(OSError):
                line.send(Kind.FAILED, f"{type(error).__name__}: {error}".encode())
            raise


def _take_part(task: RankTask, rank: int, line: Line, stack: ExitStack) -> None:
    ranks = stack.enter_context(task.join(rank))
    line.send(Kind.JOINED)
    model = task.load(ranks)
    memory = stack.enter_context(KvMemory(page_geometry(model.config, task.settings, task.layout.tp)))
    counter = Counter()
    stack.callback(counter.close)
    line.send(Kind.READY, fds=(memory.fd, counter.fd))
    answers = rank % task.layout.tp == 0
    while (message := line.receive()) is not None:
        batch = decode_step(message.data)
        logits = model.forward(batch, memory, counter_for(batch, counter.value))
        if answers:
            line.send(Kind.LOGITS, logits.reshape(-1).view(np.uint8).data)


def _connect(task: RankTask) -> socket.socket:
    """The leader may be a moment later. Raises RankLost."""
    path, deadline = Path(task.folder) / SOCKET, time.monotonic() + task.timeout_s
    while True:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.connect(str(path))
            return connected
        except OSError as error:
            connected.close()
            if time.monotonic() > deadline:
                raise RankLost(f"no leader at {path} within {task.timeout_s:g} s: {error}") from error
        time.sleep(0.02)
