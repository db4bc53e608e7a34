"""The ranks of a node beside its leader: actors next to the leader's, which end with it and are never restarted.

A node that has lost a rank fails as one: the leader ends its process, Ray restarts the leader's actor, and that starts
ranks anew. The old ones end by themselves: the leader's socket has closed, and its actors end with it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.placement import in_bundle
from actors.rank_folder import RankFolder
from pdserve.engine.ranks.member import RankTask, run_member
from pdserve.errors import RankLost

START_S = 120.0  # for Ray to start the ranks' processes
END_S = 10.0  # for ranks to end by themselves
KILL_S = 5.0  # for their processes to be gone after that


class Rank:
    """Ray actor. `run` does not return before the leader ends the node."""

    def start(self, core: int | None) -> int:
        """Pins the process, where it has a core of its own; returns its id."""
        if core is not None:
            os.sched_setaffinity(0, {core})
        return os.getpid()

    def run(self, task: RankTask, rank: int) -> None:
        run_member(task, rank)


class RankActors:
    """Ranks 1, 2, … of the node whose leader makes this; `folder` is where all of them meet.

    In the leader's placement group rank r takes bundle r and all that it holds; without a group the ranks run on the
    leader's host and take nothing that Ray counts. Raises RankLost.
    """

    def __init__(self, count: int, cores: Sequence[int], threads: int) -> None:
        self._folder = RankFolder()
        self._runs: dict[int, Any] = {}
        self._ranks = {rank: _actor(rank, threads).remote() for rank in range(1, count)}
        self.pids: dict[int, int] = {}
        try:
            starts = {rank: handle.start.remote(cores[rank] if cores else None) for rank, handle in self._ranks.items()}
            self.pids = {rank: _result(rank, ref) for rank, ref in starts.items()}
        except BaseException:
            self.close()
            raise

    @property
    def folder(self) -> str:
        return self._folder.path

    def run(self, task: RankTask) -> None:
        """Lets them look for their leader."""
        self._runs = {rank: handle.run.remote(task, rank) for rank, handle in self._ranks.items()}

    def why(self) -> str:
        """What Ray knows of ranks that have ended by now, to be put behind a message; empty if nothing."""
        ended, _ = ray.wait(list(self._runs.values()), num_returns=len(self._runs), timeout=1.0)
        reasons = []
        for rank, ref in self._runs.items():
            if ref in ended:
                try:
                    ray.get(ref)
                except RayError as error:
                    reasons.append(f"; rank {rank}: {_last_line(error)}")
        return "".join(reasons)

    def close(self) -> None:
        """After the leader has ended them; on return their processes are gone. Idempotent."""
        if self._runs:
            ray.wait(list(self._runs.values()), num_returns=len(self._runs), timeout=END_S)
        for handle in self._ranks.values():
            with contextlib.suppress(RayError):
                ray.kill(handle, no_restart=True)
        self._runs, self._ranks = {}, {}
        until = time.monotonic() + KILL_S
        while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in self.pids.values()):
            time.sleep(0.01)
        self._folder.close()


def _actor(rank: int, threads: int) -> Any:
    limits = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return ray.remote(Rank).options(max_restarts=0, runtime_env={"env_vars": limits}, **_place(rank))


def _place(rank: int) -> dict[str, Any]:
    group = get_current_placement_group()
    if group is None:
        here = ray.get_runtime_context().get_node_id()
        return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)}
    return in_bundle(group, rank)


def _result(rank: int, ref: Any) -> Any:
    try:
        return ref.future().result(START_S)
    except FutureTimeout as error:
        raise RankLost(f"Ray has not started rank {rank} within {START_S:g} s") from error
    except RayError as error:
        raise RankLost(f"rank {rank} did not start: {_last_line(error)}") from error


def _last_line(error: RayError) -> str:
    """Ray's text of a failed call ends with the exception itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
