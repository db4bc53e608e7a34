"""What a side of a pair can be asked for; subclasses say how."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from pdserve.bench.transport.load import Load, SideSpec

PING_BYTES = 4096
PONG_BYTES = 64


class Side:
    """One process of a pair. What it is asked for, and what it answers, goes through JSON.

    `memory` is what pages are read from or land in, `mail` where a small write back lands. Addresses in bytes.
    """

    ASKED = (
        "start", "meet", "fill", "verify", "prepare", "run", "post", "ping", "pong", "call", "hear", "rest", "idle",
    )  # fmt: skip

    def __init__(self, spec: SideSpec) -> None:
        self.spec = spec
        self.memory = np.zeros(max(spec.total_bytes, 1 << 16), np.uint8)
        self.mail = np.zeros(PING_BYTES, np.uint8)
        self.address = int(self.memory.ctypes.data)
        self.mail_address = int(self.mail.ctypes.data)

    def start(self) -> dict[str, Any]:
        """What the other side must know, and `about`: one line on what runs here.

        `modes`, where it can be pinged: `polled` by the caller, `callback` through a worker thread.
        """
        raise NotImplementedError

    def meet(self, other: dict[str, Any]) -> None:
        raise NotImplementedError

    def fill(self, kind: Any, block_bytes: int, blocks: int) -> None:
        """The sender gets the content, the receiver zeros."""
        content = Load(kind, block_bytes, blocks).content().reshape(-1)
        self.memory[: content.nbytes] = content if self.spec.sends else 0

    def verify(self, kind: Any, block_bytes: int, blocks: int, number: int) -> bool:
        load = Load(kind, block_bytes, blocks)
        source, target = load.order(number)
        landed = self.memory[: load.total_bytes].reshape(blocks, block_bytes)
        return bool((landed[target] == load.content()[source]).all())

    def prepare(self, kind: Any, block_bytes: int, blocks: int, number: int) -> None:
        """Everything of a round that is not its work: the order of blocks."""
        self.load = Load(kind, block_bytes, blocks)
        self.source_index, self.target_index = self.load.order(number)

    def run(self) -> float:
        """The round that was prepared. Returns the CPU seconds that this process took for it."""
        begun = time.process_time()
        (self.send if self.spec.sends else self.receive)()
        return time.process_time() - begun

    def send(self) -> None:
        raise NotImplementedError

    def receive(self) -> None:
        raise NotImplementedError

    def post(self) -> float:
        """Sends the round that was prepared; returns the seconds until the caller had control again."""
        raise NotImplementedError

    def ping(self, mode: str, count: int) -> list[float]:
        """Round trips of PING_BYTES there and PONG_BYTES back, in µs each."""
        raise NotImplementedError

    def pong(self, mode: str, count: int) -> None:
        """Answers them."""
        raise NotImplementedError

    def call(self, mode: str, count: int, pause_s: float) -> list[float]:
        """Wakes the other side so many times after a pause; returns the clock's µs at each."""
        raise NotImplementedError

    def hear(self, mode: str, count: int) -> list[float]:
        """Returns the clock's µs at which this side's callback was called."""
        raise NotImplementedError

    def rest(self, mode: str) -> None:
        """`armed`: what pings and wake-ups need is ready. `open`: it is not, as at the start."""

    def idle(self, seconds: float) -> float:
        """Share of a core that this process takes while nothing is asked of it."""
        begun, cpu = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        return (time.process_time() - cpu) / (time.perf_counter() - begun)

    def close(self) -> None:
        """Ends what a killed process would leave behind."""


def now_us() -> float:
    """The clock that all processes of a host share."""
    return time.perf_counter_ns() / 1e3
