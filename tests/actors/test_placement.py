"""Where nodes are placed, on real clusters of three raylets; one too small is told at once, and left as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.request import urlopen

import pytest
import ray
from ray._private.state import actors as table_of_actors
from ray.cluster_utils import Cluster as Raylets
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from actors.connect import joined_ray
from actors.launch import launch
from actors.placement import Placement, find_groups, in_bundle
from pdserve.config import ModelSettings, Settings, TransportSettings, load_settings
from pdserve.errors import ClusterTooSmall, ConfigError, PdserveError
from pdserve.types import FinishReason, GenerationRequest, NodeId, RequestId, SamplingParams
from policies.placement import deployment_of
from tests.actors.conftest import TINY_ENGINE, assert_nothing_left, eventually, generate_all, pools_are_whole

ROOT = Path(__file__).parents[2]
PAIR = (NodeId("prefill-0"), NodeId("decode-0"))


class Where:
    """An actor that does nothing but tell where it runs."""

    def host(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    """A head without room, and two hosts of two CPUs each."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RAY_AUTH_MODE", "disabled"), ("RAY_USAGE_STATS_ENABLED", "0")):
            patch.setenv(name, value)
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        small = {"object_store_memory": 80 << 20}
        started = Raylets(True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
        try:
            for _ in range(2):
                started.add_node(num_cpus=2, **small)
            yield started
        finally:
            ray.shutdown()
            started.shutdown()


def settings(raylets: Raylets, model: Path | None = None, **deployment: object) -> Settings:
    keys = {f"deployment.{key.replace('__', '.')}": value for key, value in deployment.items()}
    path = {} if model is None else {"model.path": str(model)}
    return load_settings(None, {"ray_address": raylets.address, **path, **keys, **TINY_ENGINE})


def assert_nothing_taken() -> None:
    """No group and no actor of ours is left in the cluster that this process has joined."""
    assert all(group["state"] == "REMOVED" for group in placement_group_table().values())
    eventually(lambda: not ray.util.list_named_actors(all_namespaces=True), "no actor is left")


def hosts_of(group_table: Mapping[str, object]) -> set[str]:
    return set(dict(group_table["bundles_to_node_id"]).values())  # type: ignore[call-overload]


def request(name: str) -> GenerationRequest:
    return GenerationRequest(RequestId(name), tuple(range(1, 60)), SamplingParams(max_tokens=8, temperature=0.0))


def test_nodes_are_spread_and_their_ranks_kept_together(raylets: Raylets) -> None:
    deployment = deployment_of(settings(raylets, prefill__tp=2, decode__dp=2))
    with joined_ray(raylets.address):
        with Placement(deployment) as placement:
            hosts = placement.hosts()
            assert placement.nodes == PAIR and set(hosts.values()) == {node.node_id for node in raylets.worker_nodes}
            tables = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
            assert len(tables) == 2
            for table in tables:
                assert table["strategy"] == "STRICT_PACK" and table["bundles"] == {0: {"CPU": 1}, 1: {"CPU": 1}}
                assert len(hosts_of(table)) == 1
            for node in PAIR:
                leader = ray.remote(Where).options(**placement.leader(node)).remote()
                assert ray.get(leader.host.remote())[0] == hosts[node]
        assert_nothing_taken()


def test_what_a_closed_deployment_took_is_free_for_the_next(raylets: Raylets) -> None:
    deployment = deployment_of(settings(raylets, prefill__tp=2, decode__tp=2))
    with joined_ray(raylets.address):
        for _ in range(3):
            Placement(deployment).close()
        taken = placement_group([{"CPU": 2}])
        assert taken.wait(10)
        try:
            with pytest.raises(ClusterTooSmall, match=r"no room for 1 of 1 (prefill|decode) nodes"):
                find_groups(deployment)
        finally:
            remove_placement_group(taken)
        Placement(deployment).close()
        assert_nothing_taken()


@pytest.mark.slow  # 20 s: Ray gives a host up after ten
def test_a_node_that_lost_its_host_is_placed_where_there_is_room(raylets: Raylets) -> None:
    """Its group's host is a wish at first, not a condition for ever."""
    spare = raylets.add_node(num_cpus=4, resources={"nic:efa": 4}, object_store_memory=80 << 20)
    keys = {"nics": 1, "nic_type": "efa"}
    asked = settings(raylets, decode__tp=2, prefill__cpus=2, **{f"decode__{key}": value for key, value in keys.items()})
    with joined_ray(raylets.address), Placement(deployment_of(asked)) as placement:
        assert placement.hosts()[PAIR[1]] == spare.node_id
        leader = ray.remote(Where).options(max_restarts=-1, **placement.leader(PAIR[1])).remote()
        assert ray.get(leader.host.remote())[0] == spare.node_id
        another = raylets.add_node(num_cpus=4, resources={"nic:efa": 4}, object_store_memory=80 << 20)
        raylets.remove_node(spare, allow_graceful=False)
        eventually(lambda: placement.hosts()[PAIR[1]] == another.node_id, "the group has moved")
        eventually(lambda: ray.get(leader.host.remote())[0] == another.node_id, "its actor has moved, too")
    raylets.remove_node(another)


@pytest.mark.parametrize("preset", ["qwen-tp", "r1-dp"])
def test_a_cluster_too_small_is_left_as_it_was(raylets: Raylets, preset: str) -> None:
    with pytest.raises(
        ClusterTooSmall, match=f"too small for {preset}: no room .* each 8 bundles of {{CPU: 2, GPU: 1}}"
    ):
        launch(settings(raylets, preset=preset), http=False)
    with joined_ray(raylets.address):
        assert_nothing_taken()


def test_a_launch_that_fails_gives_everything_back(raylets: Raylets, tiny_model: Path) -> None:
    asked = settings(raylets, tiny_model)
    broken = asked.model_copy(update={"transport": TransportSettings(provider="tcp", libfabric="/no/such.so")})
    with pytest.raises(PdserveError, match=r"(prefill|decode)-0 did not start: .*/no/such\.so"):
        launch(broken, http=False)
    with joined_ray(raylets.address):
        assert_nothing_taken()


def test_a_nic_that_is_not_there_is_named_before_anything_starts(tiny_model: Path) -> None:
    wire = TransportSettings(provider="tcp", nics=["nosuch0"])
    with pytest.raises(ConfigError, match=r"transport\.nics: tcp has no NIC 'nosuch0' on this machine; it has: "):
        launch(Settings(model=ModelSettings(path=str(tiny_model)), transport=wire), http=False)


def test_experts_are_asked_for_of_models_that_have_them(raylets: Raylets, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"deployment\.decode\.ep: tiny has no experts to share out"):
        launch(settings(raylets, tiny_model, decode__dp=2, decode__ep=True), http=False)


def test_a_served_pair_is_on_two_hosts_and_comes_back_to_its_bundles(raylets: Raylets, tiny_model: Path) -> None:
    """A killed node is restarted with its ranks in its group; while it serves, a second deployment is refused."""
    with launch(settings(raylets, tiny_model, decode__tp=2)) as cluster:
        with urlopen(f"{cluster.url}/v1/models", timeout=10) as answer:
            assert answer.status == 200
        cards = cluster.cards()
        pids = {card.pid for card in cards.values()}
        before = places()
        assert before["DecodeNode"] == before["Rank"] != before["PrefillNode"]
        assert generate_all(cluster, [request("one")])[RequestId("one")][-1].finish is FinishReason.LENGTH
        os.kill(cards[PAIR[1]].pid, signal.SIGKILL)
        eventually(lambda: cluster.cards()[PAIR[1]].pid != cards[PAIR[1]].pid, "the node is back")
        eventually(lambda: all(s.usable for s in ray.get(cluster.scheduler.nodes.remote())), "it is verified")
        assert places() == before
        assert generate_all(cluster, [request("two")])[RequestId("two")][-1].finish is FinishReason.LENGTH
        eventually(lambda: pools_are_whole(cluster), "all pages are free")
        pids |= {card.pid for card in cluster.cards().values()}
        assert_second_is_refused(raylets)
    assert_nothing_left(pids)
    with joined_ray(raylets.address):
        assert_nothing_taken()


def places() -> dict[str, str]:
    """The host of each living actor, by its class, but for the scheduler's, which may be anywhere."""
    living = [entry for entry in table_of_actors().values() if entry["State"] == "ALIVE"]
    found = [(entry["ActorClassName"], entry["Address"]["NodeID"]) for entry in living]
    assert {name for name, _ in found} > {"DecodeNode", "GlobalScheduler", "PrefillNode", "Rank"}
    return {name: host for name, host in found if name in ("DecodeNode", "PrefillNode", "Rank")}


def assert_second_is_refused(raylets: Raylets) -> None:
    run = serve(f"ray_address={raylets.address}")
    assert run.returncode == 2 and "already; end that first" in run.stderr


def serve(*overrides: str) -> subprocess.CompletedProcess[str]:
    sets = [part for override in overrides for part in ("--set", override)]
    command = [sys.executable, "-m", "pdserve", "serve", "--port", "0", *sets]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_serving_a_preset_on_too_small_a_machine_ends_at_once() -> None:
    """With a Ray of our own it is known before that is started."""
    started_s = time.perf_counter()
    run = serve("deployment.preset=qwen-tp")
    assert time.perf_counter() - started_s < 30  # 2 s on a quiet machine, most of it imports
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("pdserve: the cluster is too small for qwen-tp: no room for ")
    assert "each 8 bundles of {CPU: 2, GPU: 1} on one host (free now: this host CPU: 64, GPU: " in last


def test_in_a_bundle_an_actor_takes_all_that_it_holds(raylets: Raylets) -> None:
    with joined_ray(raylets.address):
        group = placement_group([{"CPU": 0.5}, {"CPU": 1}], strategy="STRICT_PACK")
        options = in_bundle(group, 1)
        assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (1, 0, {})
        assert options["scheduling_strategy"].placement_group_bundle_index == 1
        remove_placement_group(group)
