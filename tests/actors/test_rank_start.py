"""How a node's ranks start and end: with what reason a start fails, where they run, and what is left of them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.colocated_node import ColocatedNode
from actors.launch import Cluster, launch
from actors.local_ray import start_local_ray
from actors.names import node_of, replica_address, replica_in
from actors.node_core import NodeSpec
from actors.rank_folder import RankFolder
from pdserve.config import load_settings
from pdserve.errors import ConfigError, PdserveError
from pdserve.parallel.gloo import RankLayout
from pdserve.types import NodeId, Role
from tests.actors.conftest import TINY_ENGINE, eventually


def test_a_rank_that_cannot_start_fails_the_launch_with_its_reason(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Cluster._node_specs

    def with_a_core_that_is_not_there(*args: Any) -> list[NodeSpec]:
        core = min(os.sched_getaffinity(0))
        return [replace(spec, cores=(core, 100_000)) for spec in given(*args)]

    monkeypatch.setattr(Cluster, "_node_specs", with_a_core_that_is_not_there)
    keys = {"model.path": str(tiny_model), "deployment.colocated": {"count": 1, "tp": 2}}
    with pytest.raises(PdserveError, match=r"colocated-0 did not start: .*RankLost: rank 1 did not start: OSError"):
        launch(load_settings(None, TINY_ENGINE | keys), http=False)
    assert not ray.is_initialized()


def test_without_a_placement_group_ranks_run_beside_their_leader(tiny_model: Path) -> None:
    settings = load_settings(None, {"deployment.colocated": 1, **TINY_ENGINE})
    spec = NodeSpec(NodeId("alone"), Role.COLOCATED, settings, str(tiny_model), RankLayout(tp=2))
    with start_local_ray("pdserve"):
        node = ray.remote(ColocatedNode).options(num_cpus=0, max_concurrency=10).remote(spec)
        metrics, ranks = ray.get(node.metrics.remote()), ray.get(node.rank_pids.remote())
        assert (metrics["engine_ranks"], metrics["engine_replicas"], list(ranks)) == (2, 1, [1])
        ray.get(node.close.remote())
        eventually(lambda: not Path(f"/proc/{ranks[1]}").exists(), "the other rank has ended")


def test_a_folder_of_a_leader_that_was_killed_is_removed_by_the_next_one(tmp_path: Path) -> None:
    program = (
        "import os, sys; from actors.rank_folder import RankFolder; print(RankFolder(sys.argv[1]).path, flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; os._exit(9)", tmp_path], stdout=subprocess.PIPE, text=True
    )
    left = Path(done.stdout.strip())
    (left / "leader").touch()
    other = tempfile.mkdtemp(dir=tmp_path)
    first, second = RankFolder(str(tmp_path)), RankFolder(str(tmp_path))
    assert not left.exists() and Path(other).exists()
    assert len({first.path, second.path}) == 2 and Path(first.path).exists(), "who lives keeps its own"
    for folder in (first, second, first):
        folder.close()
    assert list(tmp_path.iterdir()) == [Path(other)]


def test_a_folder_that_cannot_be_locked_is_no_reason_to_try_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("actors.rank_folder.fcntl.flock", refuse)
    with pytest.raises(ConfigError, match=r"No locks available.*set TMPDIR to a local path"):
        RankFolder(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_addresses_of_replicas() -> None:
    node = NodeId("decode-0")
    assert replica_address(node, 0, 1) == node == node_of(node)
    addresses = [replica_address(node, number, 3) for number in range(3)]
    assert addresses == ["decode-0.0", "decode-0.1", "decode-0.2"] and {node_of(each) for each in addresses} == {node}
    with pytest.raises(LookupError, match=r"no engine replica decode-0\.7 here, only decode-0\.0, decode-0\.1"):
        replica_in(dict.fromkeys(addresses), NodeId("decode-0.7"))
