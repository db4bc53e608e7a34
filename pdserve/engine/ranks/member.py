"""A rank that is not the leader: computes what the leader tells it, and ends with it."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pdserve.config import EngineSettings
from pdserve.engine.limits import page_geometry
from pdserve.engine.ranks.line import Line
from pdserve.engine.ranks.steps import decode_step
from pdserve.errors import RankLost
from pdserve.kv.memory import KvMemory
from pdserve.models.decoder import Decoder
from pdserve.models.load import load_rank
from pdserve.parallel.gloo import GlooRanks, RankLayout

WHO = struct.Struct("<I")
READY, FAILED = b"R", b"F"
SOCKET, MEETING = "leader", "meeting"


@dataclass(frozen=True, slots=True)
class RankTask:
    """What all ranks of a node are told. `folder`: on their host, for the socket and the rendezvous."""

    folder: str
    layout: RankLayout
    model_path: str
    settings: EngineSettings
    timeout_s: float = 60.0  # for a collective, and for each stage of the start

    @property
    def rendezvous(self) -> str:
        return f"file://{self.folder}/{MEETING}"

    def load(self, ranks: GlooRanks) -> Decoder:
        settings = self.settings
        return load_rank(self.model_path, settings.dtype, ranks.parallel, deterministic=settings.deterministic)


class Counter:
    """A layer counter `(1,) int64` over a memfd, which another process may map."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("pdserve-layers", os.MFD_CLOEXEC) if fd is None else fd
        os.ftruncate(self.fd, 8)
        self.value: NDArray[np.int64] = np.frombuffer(mmap.mmap(self.fd, 8), np.int64)

    def close(self) -> None:
        os.close(self.fd)


def run_member(task: RankTask, rank: int) -> None:
    """Until the leader ends it, or is gone. Raises what stops this rank; the leader has heard of it by then."""
    with ExitStack() as stack:
        line = Line(_connect(task))
        stack.callback(line.close)
        line.send(WHO.pack(rank))
        try:
            ranks = stack.enter_context(GlooRanks(task.layout, rank, task.rendezvous, task.timeout_s))
            model = task.load(ranks)
            memory = stack.enter_context(KvMemory(page_geometry(model.config, task.settings, task.layout.tp)))
            counter = Counter()
            stack.callback(counter.close)
        except Exception as error:
            line.send(FAILED + f"{type(error).__name__}: {error}".encode())
            raise
        line.send(READY, (memory.fd, counter.fd))
        _serve(line, model, memory, counter.value, answers=rank % task.layout.tp == 0)


def _serve(line: Line, model: Decoder, memory: KvMemory, counter: NDArray[np.int64], *, answers: bool) -> None:
    while (message := line.receive()) is not None:
        logits = model.forward(decode_step(message), memory, counter)
        if answers:
            line.send(logits.tobytes())


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
