"""The other ranks of a node as processes, with this process, or another one, as the leader."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pdserve.config import EngineSettings
from pdserve.engine.ranks.leader import NodeRanks
from pdserve.engine.ranks.local import start_member
from pdserve.engine.ranks.member import RankTask
from pdserve.parallel.gloo import RankLayout

ROOT = Path(__file__).resolve().parents[3]
END_S = 20.0
_LEADER = """
import pickle, sys, time
from pdserve.engine.ranks.leader import NodeRanks
with NodeRanks(pickle.load(sys.stdin.buffer)) as ranks:
    print("ready", flush=True)
    time.sleep(600)
"""


@contextmanager
def task_of(layout: RankLayout, directory: Path, settings: EngineSettings, **limits_s: float) -> Iterator[RankTask]:
    with tempfile.TemporaryDirectory() as folder:
        yield replace(RankTask(folder, layout, str(directory), settings), **limits_s)


@contextmanager
def members_of(tasks: Sequence[RankTask]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of ranks 1, 2, …, each with its task."""
    others: list[subprocess.Popen[bytes]] = []
    try:
        others += [start_member(task, rank) for rank, task in enumerate(tasks, 1)]
        yield others
    finally:
        for process in others:
            process.kill()
            process.wait()


@contextmanager
def node_of(
    layout: RankLayout, directory: Path, settings: EngineSettings, on_lost: Callable[[str], None] | None = None,
    **limits_s: float,
) -> Iterator[tuple[NodeRanks, list[subprocess.Popen[bytes]]]]:  # fmt: skip
    """The node, and the processes of ranks 1, 2, …; these have ended afterwards, by themselves."""
    with (
        task_of(layout, directory, settings, **limits_s) as task,
        members_of([task] * (layout.ranks - 1)) as others,
    ):
        with NodeRanks(task, on_lost) as ranks:
            yield ranks, others
        for process in others:
            process.wait(END_S)


@contextmanager
def leader_of(task: RankTask) -> Iterator[subprocess.Popen[bytes]]:
    """A leader in a process of its own; it says "ready" when it is, and serves nothing."""
    process = subprocess.Popen(
        [sys.executable, "-c", _LEADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        with process.stdin as told:
            pickle.dump(task, told)
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
