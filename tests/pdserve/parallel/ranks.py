"""Real processes as ranks: a function by name runs in each, over gloo, and returns what can be pickled."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pdserve.parallel.gloo import RankLayout

ROOT = Path(__file__).resolve().parents[3]
_PROGRAM = """
import pickle, sys, importlib
folder, rank = sys.argv[1], int(sys.argv[2])
with open(folder + "/task", "rb") as file:
    layout, module, name, arguments, timeout_s = pickle.load(file)
from pdserve.parallel.gloo import GlooRanks
with GlooRanks(layout, rank, "file://" + folder + "/meet", timeout_s) as ranks:
    result = getattr(importlib.import_module(module), name)(ranks.parallel, *arguments)
with open(f"{folder}/result{rank}", "wb") as file:
    pickle.dump(result, file)
"""


def start_ranks(layout: RankLayout, task: tuple[str, str], arguments: tuple[Any, ...], folder: Path,
                timeout_s: float = 60.0) -> list[subprocess.Popen[bytes]]:  # fmt: skip
    """`task` is (module, function); the function gets the ModelParallel, then the arguments."""
    (folder / "task").write_bytes(pickle.dumps((layout, *task, arguments, timeout_s)))
    return [
        subprocess.Popen([sys.executable, "-c", _PROGRAM, str(folder), str(rank)], cwd=ROOT, stderr=subprocess.PIPE)
        for rank in range(layout.ranks)
    ]


def run_ranks(layout: RankLayout, task: tuple[str, str], *arguments: Any) -> list[Any]:
    """Results in order of ranks; fails with a rank's own words."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = start_ranks(layout, task, arguments, folder)
        try:
            for process in running:
                _, errors = process.communicate(timeout=120)
                assert process.returncode == 0, errors.decode()[-3000:]
        finally:
            for process in running:
                process.kill()
                process.wait()
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(layout.ranks)]
