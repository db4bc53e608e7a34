"""What becomes of a node whose ranks do not come, do not load, hang, or end; and of ranks whose leader is gone."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from pdserve.engine.ranks.leader import NodeRanks
from pdserve.engine.ranks.line import Kind, Line
from pdserve.engine.ranks.member import NUMBER, SOCKET, RankTask
from pdserve.engine.ranks.steps import EMPTY_STEP
from pdserve.errors import ConfigError, ModelError, RankLost
from pdserve.parallel.gloo import RankLayout
from pdserve.types import FinishReason, RequestId
from tests.pdserve.engine.rank_processes import END_S, leader_of, members_of, node_of, task_of
from tests.pdserve.engine.test_ranks import SETTINGS, engine_of, requests_of
from tests.pdserve.engine.toy import eventually
from tests.pdserve.models.tiny_families import make_tiny

TP2, DP2 = RankLayout(tp=2), RankLayout(dp=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("ranks") / "model")


class EndlessModel:
    """A directory that takes for ever to load, until it is closed: its configuration is a pipe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writers: list[int] = []
        path.mkdir()
        os.mkfifo(path / "config.json")

    def is_read(self) -> bool:
        """Whether somebody loads it; who does waits in the next call for what is in the file."""
        try:
            self._writers.append(os.open(self.path / "config.json", os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_read()
        for fd in self._writers:
            os.close(fd)


def loaders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pdserve-rank-0-load"]


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# ---------------------------------------------------------------- the start


@pytest.mark.slow
def test_ranks_that_do_not_come_are_named(tiny: Path) -> None:
    with task_of(RankLayout(tp=4), tiny, SETTINGS, timeout_s=8.0) as task, members_of([task]) as (other,):
        with pytest.raises(RankLost, match=r"^rank 2, rank 3 did not come within 8 s$"):
            NodeRanks(task)
        assert other.wait(END_S) == 0


def test_a_rank_that_loads_for_ever_is_named_with_its_stage(tiny: Path, tmp_path: Path) -> None:
    with (
        EndlessModel(tmp_path / "endless") as model,
        task_of(TP2, tiny, SETTINGS, load_timeout_s=4.0) as task,
        members_of([replace(task, model_path=str(model.path))]) as (other,),
    ):
        expected = rf"^rank 1 \(process {other.pid}\) did not load its part of the model within 4 s$"
        with pytest.raises(RankLost, match=expected):
            NodeRanks(task)
        assert other.wait(END_S) == 1, "it saw that its leader is gone, and could not end in any other way"


def test_a_rank_that_ends_while_the_leader_loads_shows_at_once(tiny: Path, tmp_path: Path) -> None:
    """The leader's own loading would go on for ten minutes."""
    with ExitStack() as stack:
        model = stack.enter_context(EndlessModel(tmp_path / "endless"))
        task = stack.enter_context(task_of(TP2, model.path, SETTINGS))
        (other,) = stack.enter_context(members_of([replace(task, model_path=str(tiny))]))
        killer = threading.Thread(target=lambda: (eventually(lambda: has_pages(other), 60), other.kill()))
        killer.start()
        with pytest.raises(RankLost, match=rf"rank 1 \(process {other.pid}\) has ended"):
            NodeRanks(task)
        killer.join()
        assert loaders()
    eventually(lambda: not loaders(), 20)


def has_pages(process: subprocess.Popen[bytes]) -> bool:
    return "pdserve-kv" in Path(f"/proc/{process.pid}/maps").read_text()


@contextmanager
def posing(task: RankTask, *sent: tuple[Kind | int, bytes]) -> Iterator[None]:
    """This process connects as other ranks would: each of `sent` is the first message of a connection."""
    with ExitStack() as stack:

        def speak() -> None:
            eventually(lambda: (Path(task.folder) / SOCKET).exists(), 20)
            for kind, data in sent:
                connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                connection.connect(f"{task.folder}/{SOCKET}")
                Line(connection).send(kind, data)  # type: ignore[arg-type]

        speaker = threading.Thread(target=speak)
        speaker.start()
        yield
        speaker.join()


def who(rank: int) -> tuple[Kind, bytes]:
    return Kind.WHO, NUMBER.pack(rank)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ([who(4)], "came as rank 4; this node has ranks 1 to 3 to come"),
        ([who(0)], "came as rank 0; this node has ranks 1 to 3 to come"),
        ([who(2), who(2)], r"rank 2 came twice: process \d+, then process \d+"),
        ([(Kind.LOGITS, b"")], "did not say which rank it is, but LOGITS"),
        ([(Kind.WHO, b"1")], "did not say which rank it is"),
        ([(71, b"T / HTTP/1.1")], r"sent what no rank sends \(kind 71\)"),
    ],
)
def test_who_comes_as_a_rank_is_checked(sent: list[tuple[Kind, bytes]], reason: str, tiny: Path) -> None:
    with task_of(RankLayout(tp=4), tiny, SETTINGS) as task, posing(task, *sent):
        with pytest.raises(RankLost, match=reason):
            NodeRanks(task)
        assert not (Path(task.folder) / SOCKET).exists()


def test_one_who_connects_and_leaves_without_a_word_is_forgotten(tiny: Path) -> None:
    with task_of(TP2, tiny, SETTINGS) as task:
        passing = threading.Thread(target=lambda: pass_by(task))
        passing.start()
        with members_of([task]), NodeRanks(task) as ranks:
            assert ranks.lost is None
        passing.join()


def pass_by(task: RankTask) -> None:
    eventually(lambda: (Path(task.folder) / SOCKET).exists(), 20)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{task.folder}/{SOCKET}")


def test_a_rank_that_does_not_join_is_named(tiny: Path) -> None:
    named = rf"^rank 1 \(process {os.getpid()}\) did not join the group within 3 s$"
    with (
        task_of(TP2, tiny, SETTINGS, timeout_s=3.0) as task,
        posing(task, who(1)),
        pytest.raises(RankLost, match=named),
    ):
        NodeRanks(task)
    eventually(lambda: not loaders(), 20)


def test_a_folder_that_cannot_hold_the_socket_is_refused(tiny: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", tmp_path / ("long" * 50)):
        with pytest.raises(ConfigError, match="give a fresh, short folder"):
            NodeRanks(RankTask(str(folder), TP2, str(tiny), SETTINGS))


def test_a_model_that_is_not_there_shows_as_such(tmp_path: Path) -> None:
    with (
        task_of(TP2, tmp_path / "nothing", SETTINGS) as task,
        members_of([task]),
        pytest.raises((ModelError, RankLost), match="nothing"),
    ):
        NodeRanks(task)


def test_nothing_stays_open_after_a_start_that_failed_or_a_node_that_closed(tiny: Path) -> None:
    larger = SETTINGS.model_copy(update={"kv_cache_tokens": 1024})

    def good_start() -> None:
        with node_of(TP2, tiny, SETTINGS) as (ranks, _):
            assert len(ranks.memories) == 2

    def bad_start() -> None:
        with (
            task_of(TP2, tiny, SETTINGS) as task,
            members_of([replace(task, settings=larger)]),
            pytest.raises(RankLost, match=r"rank 1 was started with another task: the memory has \d+ bytes"),
        ):
            NodeRanks(task)

    good_start()
    before = open_files()
    bad_start()
    assert open_files() == before
    good_start()
    assert open_files() == before


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize("layout", [pytest.param(TP2, id="tp2"), pytest.param(DP2, id="dp2", marks=pytest.mark.slow)])
def test_a_rank_that_hangs_in_a_step_is_noticed(layout: RankLayout, tiny: Path) -> None:
    """With tp2 the leader waits in a collective, with dp2 for the other replica's logits."""
    said: list[str] = []
    with ExitStack() as stack:
        ranks, (other,) = stack.enter_context(node_of(layout, tiny, SETTINGS, said.append, step_timeout_s=4.0))
        stack.callback(other.send_signal, signal.SIGCONT)
        replica = layout.dp - 1
        engine = stack.enter_context(engine_of(ranks, replica, SETTINGS))
        other.send_signal(signal.SIGSTOP)
        engine.submit(requests_of(replica)[1])
        collector: Any = engine.decode_hooks
        last = collector.finish(RequestId(f"{replica}-8"))
        assert last.finish is FinishReason.ERROR and "RankLost" in last.error
        assert ranks.lost == f"rank 1 (process {other.pid}) is stopped" and said == [ranks.lost]
        ranks.lose("something else")
        assert said == [ranks.lost]


def test_a_rank_that_fails_in_a_step_says_why(tiny: Path) -> None:
    said: list[str] = []
    with node_of(DP2, tiny, SETTINGS, said.append) as (ranks, (other,)):
        nonsense = replace(EMPTY_STEP, tokens=np.array([5]), logit_rows=np.array([0]))
        with pytest.raises(RankLost, match="rank 1 failed: "):
            ranks.forward(1, nonsense)
        assert said == [ranks.lost] and ranks.lost is not None and ranks.lost.startswith("rank 1 failed: ")
        assert other.wait(END_S) == 1


def test_what_is_done_about_a_loss_may_close_the_node_and_may_fail(tiny: Path) -> None:
    done: list[str] = []

    def close_and_fail(reason: str) -> None:
        ranks.close()
        done.append(reason)
        raise ValueError("on purpose")

    with task_of(TP2, tiny, SETTINGS) as task, members_of([task]) as (other,):
        ranks = NodeRanks(task, close_and_fail)
        other.kill()
        eventually(lambda: bool(done), 20)
        assert done == [f"rank 1 (process {other.pid}) has ended"] == [ranks.lost]


# ---------------------------------------------------------------- a leader that is gone


def test_ranks_end_when_their_leader_was_killed(tiny: Path) -> None:
    with (
        task_of(RankLayout(tp=2, dp=2), tiny, SETTINGS) as task,
        leader_of(task) as leader,
        members_of([task] * 3) as others,
    ):
        assert leader.stdout is not None and leader.stdout.readline() == b"ready\n"
        leader.kill()
        assert [other.wait(END_S) for other in others] == [0, 0, 0]


@pytest.mark.slow
def test_a_rank_that_still_loads_ends_when_its_leader_was_killed(tiny: Path, tmp_path: Path) -> None:
    with (
        EndlessModel(tmp_path / "endless") as model,
        task_of(TP2, tiny, SETTINGS) as task,
        leader_of(task) as leader,
        members_of([replace(task, model_path=str(model.path))]) as (other,),
    ):
        eventually(model.is_read, 60)
        leader.kill()
        assert other.wait(END_S) == 1
