"""Ranks as processes that this one starts: for benchmarks and tests. The ranks of a cluster's nodes are actors."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

from pdserve.engine.ranks.member import RankTask, run_member


def start_member(task: RankTask, rank: int, core: int | None = None) -> subprocess.Popen[bytes]:
    """Runs one rank on one thread, on a core of its own if told. The caller waits for it, or ends it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pdserve.engine.ranks.local"], stdin=subprocess.PIPE, env=environment
    )
    assert process.stdin is not None
    with process.stdin as told:
        pickle.dump((task, rank, core), told)
    return process


def main() -> None:
    task, rank, core = pickle.load(sys.stdin.buffer)
    if core is not None:
        os.sched_setaffinity(0, {core})
    run_member(task, rank)


if __name__ == "__main__":
    main()
