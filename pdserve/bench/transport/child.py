"""The program of one side: reads what it is to be, then answers one line for each that asks something of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, BinaryIO


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Until the questions end. The first is the SideSpec; then [method, arguments]; answers are [ok, value]."""
    from pdserve.bench.transport import wire
    from pdserve.bench.transport.load import SideSpec
    from pdserve.bench.transport.sides import make_side

    spec = SideSpec.from_json(wire.read(questions.readline()))
    if spec.cpus:
        os.sched_setaffinity(0, spec.cpus)
    side = make_side(spec)
    for line in iter(questions.readline, b""):
        wire.write(answers, _answer(side, *wire.read(line)))
    side.close()


def _answer(side: Any, method: str, arguments: list[Any]) -> list[Any]:
    try:
        if method not in side.ASKED:
            raise ValueError(f"a side cannot be asked for {method!r}")
        return [True, getattr(side, method)(*arguments)]
    except Exception as error:
        return [False, f"{type(error).__name__}: {error}"]


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[3])
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get among the answers
    serve(sys.stdin.buffer, replies)
    os._exit(0)  # NIXL crashes in its destructors
