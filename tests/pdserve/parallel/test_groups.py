"""Collectives over real processes: sums in order of ranks, uneven exchanges, what a lost rank looks like."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.errors import ConfigError, RankLost
from pdserve.parallel.gloo import LOOP_THREAD, GlooRanks, RankLayout
from pdserve.parallel.group import Alone, Group, ModelParallel, parts
from tests.pdserve.parallel.ranks import run_ranks, start_ranks

HERE = "tests.pdserve.parallel.test_groups"


def values(rank: int, size: int = 1000) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(size).astype(np.float32)


def exercise(parallel: ModelParallel) -> dict[str, Any]:
    group = parallel.ep
    total = values(group.rank)
    group.all_reduce(total)
    root = np.full(3, group.rank)
    group.broadcast(root)
    return {
        "who": (parallel.tp.rank, parallel.tp.size, group.rank, group.size),
        "total": total,
        "gathered": group.all_gather(np.array([group.rank, 7])),
        "at root": group.gather(np.array([group.rank])),
        "root": root,
        "exchanged": exchange(group),
        "none": group.all_to_all(np.empty((0, 2), np.float32), [0] * group.size, [0] * group.size),
    }


def exchange(group: Group) -> np.ndarray:
    """Rank r sends i rows to rank i, each of them (r, i)."""
    sent = list(range(group.size))
    rows = np.array([(group.rank, to) for to in sent for _ in range(to)], np.float32).reshape(-1, 2)
    return group.all_to_all(rows, sent, [group.rank] * group.size)


@pytest.mark.parametrize("layout", [RankLayout(tp=2, ep=True), RankLayout(tp=2, dp=2, ep=True)])
def test_collectives(layout: RankLayout) -> None:
    results, size = run_ranks(layout, (HERE, "exercise")), layout.ranks
    expected = values(0)
    for rank in range(1, size):
        expected = expected + values(rank)
    for rank, result in enumerate(results):
        assert result["who"] == (rank % 2, 2, rank, size)
        assert np.array_equal(result["total"], expected), "in order of ranks, bit for bit"
        assert result["gathered"].tolist() == [[other, 7] for other in range(size)]
        assert (result["at root"] is not None) == (rank == 0)
        assert result["root"].tolist() == [0, 0, 0]
        assert result["exchanged"].tolist() == [[other, rank] for other in range(size) for _ in range(rank)]
        assert result["none"].shape == (0, 2)
    assert results[0]["at root"].tolist() == [[other] for other in range(size)]


def wait_for_the_other(parallel: ModelParallel) -> None:
    """Rank 1 leaves without a word."""
    if parallel.tp.rank == 1:
        raise SystemExit(3)
    parallel.tp.all_reduce(np.ones(4, np.float32))


def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    running = start_ranks(RankLayout(tp=2), (HERE, "wait_for_the_other"), (), tmp_path, timeout_s=5.0)
    errors = [process.communicate(timeout=60)[1].decode() for process in running]
    assert [process.returncode for process in running] == [1, 3]
    assert "RankLost: all_reduce of rank 0 with 1 others did not end" in errors[0]


def policies_of_loops(parallel: ModelParallel) -> list[int]:
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().startswith(LOOP_THREAD)]
    return [os.sched_getscheduler(int(task.name)) for task in tasks]


def test_event_loops_cut_in_on_nobody() -> None:
    """gloo's name for these threads is its own affair: this fails where it has changed."""
    for found in run_ranks(RankLayout(tp=2, ep=True), (HERE, "policies_of_loops")):
        assert found and set(found) == {os.SCHED_BATCH}


def leave_and_go_on(parallel: ModelParallel) -> str:
    parallel.tp.close()  # type: ignore[attr-defined]
    try:
        parallel.tp.all_reduce(np.ones(1, np.float32))
    except RankLost as error:
        return str(error)
    return "nothing happened"


def test_who_has_left_a_group_is_told_so() -> None:
    said = run_ranks(RankLayout(tp=2), (HERE, "leave_and_go_on"))
    assert said == [f"all_reduce of rank {rank}: it has left the group" for rank in (0, 1)]


def join_after_a_failure(parallel: ModelParallel, folder: str) -> float:
    """A group that never comes together leaves nothing that a later one would stumble over."""
    rank = parallel.tp.rank
    if rank == 0:
        with pytest.raises(RankLost, match="rank 0 could not join 2 ranks"):
            GlooRanks(RankLayout(tp=2), 0, f"file://{folder}/first", 1.0)
    total = np.ones(1, np.float32)
    with GlooRanks(RankLayout(tp=2), rank, f"file://{folder}/second") as ranks:
        ranks.parallel.tp.all_reduce(total)
        assert ranks.spent().collectives == 1 and ranks.spent().seconds > 0
    return float(total[0])


def test_a_failed_start_does_not_spoil_the_next(tmp_path: Path) -> None:
    assert run_ranks(RankLayout(tp=2), (HERE, "join_after_a_failure"), str(tmp_path)) == [2.0, 2.0]


def test_a_group_of_one_changes_nothing() -> None:
    group, array = Alone(), np.arange(3, dtype=np.float32)
    group.all_reduce(array)
    assert array.tolist() == [0, 1, 2] and group.all_gather(array).shape == (1, 3)
    assert group.all_to_all(array, [3], [3]) is array


def test_parts_are_contiguous_and_even() -> None:
    assert [(part.start, part.stop) for part in parts(10, 4)] == [(0, 2), (2, 5), (5, 7), (7, 10)]


def test_a_rank_outside_the_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rank 4 is not one of 4 \(tp 2 x dp 2\)"):
        GlooRanks(RankLayout(2, 2), 4, "file:///nowhere")
