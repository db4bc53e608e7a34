"""The other ranks of a node as processes, with this process as the leader."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.config import EngineSettings
from pdserve.engine.ranks.leader import NodeRanks
from pdserve.engine.ranks.member import RankTask
from pdserve.parallel.gloo import RankLayout

ROOT = Path(__file__).resolve().parents[3]
_PROGRAM = """
import pickle, sys
from pdserve.engine.ranks.member import run_member
with open(sys.argv[1], "rb") as file:
    run_member(pickle.load(file), int(sys.argv[2]))
"""


@contextmanager
def node_of(
    layout: RankLayout, directory: Path, settings: EngineSettings
) -> Iterator[tuple[NodeRanks, list[subprocess.Popen[bytes]]]]:
    """The node, and the processes of ranks 1, 2, …; these have ended afterwards, by themselves."""
    with tempfile.TemporaryDirectory() as folder:
        task = RankTask(folder, layout, str(directory), settings)
        (Path(folder) / "task").write_bytes(pickle.dumps(task))
        others = [
            subprocess.Popen([sys.executable, "-c", _PROGRAM, f"{folder}/task", str(rank)], cwd=ROOT)
            for rank in range(1, layout.ranks)
        ]
        try:
            with NodeRanks(task) as ranks:
                yield ranks, others
            for process in others:
                process.wait(20)
        finally:
            for process in others:
                process.kill()
                process.wait()
