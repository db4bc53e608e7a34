"""The control message of a step by itself: encoded here, sent to a process on the other core, decoded there.

`time.perf_counter` is one clock for all processes of a host, so the other end's reading says when the batch was there.
The receiver sleeps in between, as a rank between two steps does: its waking is part of the time.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from pdserve.attention.batch import RaggedBatch
from pdserve.engine.ranks.line import Kind, Line
from pdserve.engine.ranks.steps import decode_step, encode_step
from pdserve.errors import RankLost

PAUSE_S = 0.002
TIMEOUT_S = 60.0
_CLOCK = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class MessageTimes:
    """Medians, in seconds. `whole_s`: from the batch here to the batch there."""

    size_bytes: int
    encode_s: float
    send_s: float
    whole_s: float


@contextmanager
def other_end(core: int | None) -> Iterator[Line]:
    ours, theirs = socket.socketpair()
    command = [
        sys.executable,
        "-m",
        "pdserve.bench.ranks.message",
        str(theirs.fileno()),
        str(-1 if core is None else core),
    ]
    with ours, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        line = Line(ours, TIMEOUT_S)
        try:
            yield line
        finally:
            line.end()
            process.wait()


def measure_message(line: Line, batch: RaggedBatch, times: int) -> MessageTimes:
    """Raises RankLost when the other end has ended."""
    samples = [_sample(line, batch) for _ in range(times + times // 10 + 1)][times // 10 + 1 :]
    encode, send, whole = (median(column) for column in zip(*samples, strict=True))
    return MessageTimes(len(encode_step(batch)), encode, send, whole)


def _sample(line: Line, batch: RaggedBatch) -> tuple[float, float, float]:
    time.sleep(PAUSE_S)
    begun_s = time.perf_counter()
    message = encode_step(batch)
    encoded_s = time.perf_counter()
    line.send(Kind.STEP, message)
    sent_s = time.perf_counter()
    answer = line.receive()
    if answer is None:
        raise RankLost("the process at the other end of the control message has ended")
    return encoded_s - begun_s, sent_s - encoded_s, _CLOCK.unpack(answer.data)[0] - begun_s


def _answer(line: Line) -> None:
    while (message := line.receive()) is not None:
        decode_step(message.data)
        line.send(Kind.LOGITS, _CLOCK.pack(time.perf_counter()))


if __name__ == "__main__":
    if sys.argv[2] != "-1":
        os.sched_setaffinity(0, {int(sys.argv[2])})
    _answer(Line(socket.socket(fileno=int(sys.argv[1]))))
