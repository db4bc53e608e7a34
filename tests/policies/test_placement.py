"""Presets and free forms to bundles; a cluster that is too small is refused with what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import PRESETS, load_settings
from pdserve.errors import ClusterTooSmall
from pdserve.types import Role
from policies.layout import KvLayout
from policies.placement import Deployment, Host, NodeKind, RankResources, assign_hosts, deployment_of
from policies.sharding import ParallelLayout

CLUSTERS = Path(__file__).parents[2] / "clusters"


def preset(name: str, **overrides: Any) -> Deployment:
    keys = {f"deployment.{key.replace('__', '.')}": value for key, value in overrides.items()}
    return deployment_of(load_settings(None, {"deployment.preset": name, **keys}))


def gpu_hosts(count: int, gpus: float = 8) -> list[Host]:
    return [Host(f"host-{k}", {"CPU": 96, "GPU": gpus, "memory": 1e12}) for k in range(count)]


@pytest.mark.parametrize("name", ["qwen-tp", "r1-tp", "r1-dp"])
def test_the_reference_deployments_take_a_host_per_node(name: str) -> None:
    groups = assign_hosts(preset(name), gpu_hosts(4))
    assert len({group.host for group in groups}) == len(groups) == 4
    for group in groups:
        assert group.strategy == "STRICT_PACK"
        assert group.bundles == ({"CPU": 2, "GPU": 1},) * 8
    assert {group.name for group in groups} == {
        f"{kind.role}-{k}" for kind in preset(name).kinds for k in range(kind.count)
    }


@pytest.mark.parametrize("name", ["qwen-tp", "r1-tp", "r1-dp"])
def test_the_shipped_files_take_the_same(name: str) -> None:
    groups = assign_hosts(deployment_of(load_settings(CLUSTERS / f"{name}.yaml")), gpu_hosts(4))
    assert groups == assign_hosts(preset(name), gpu_hosts(4))


def test_the_local_preset_needs_one_host_and_no_gpu() -> None:
    groups = assign_hosts(preset("local"), [Host("here", {"CPU": 2})])
    assert [(group.name, group.host, group.bundles) for group in groups] == [
        ("prefill-0", "here", ({"CPU": 1},)),
        ("decode-0", "here", ({"CPU": 1},)),
    ]


def test_types_are_asked_for_by_resource() -> None:
    rank = {"cpus": 4, "gpu_type": "H200", "nics": 2, "nic_type": "efa"}
    keys = {f"{kind}__{key}": value for kind in ("prefill", "decode") for key, value in rank.items()}
    deployment = preset("r1-dp", prefill=1, decode=2, **keys)
    wanted = {"CPU": 4, "GPU": 1, "accelerator_type:H200": 0.001, "nic:efa": 2}
    hosts = [Host(h.id, {**h.free, "accelerator_type:H200": 1.0, "nic:efa": 16}) for h in gpu_hosts(3)]
    groups = assign_hosts(deployment, hosts)
    assert [group.role for group in groups] == [Role.PREFILL, Role.DECODE, Role.DECODE]
    assert all(group.bundles == (wanted,) * 8 for group in groups)
    with pytest.raises(ClusterTooSmall, match="nic:efa: 2"):
        assign_hosts(deployment, gpu_hosts(3))


def test_a_small_cluster_is_told_what_is_missing() -> None:
    with pytest.raises(ClusterTooSmall) as caught:
        assign_hosts(preset("r1-tp"), [*gpu_hosts(2), Host("desk", {"CPU": 8})])
    assert str(caught.value) == (
        "the cluster is too small for r1-tp: no room for 2 of 3 decode nodes, each 8 bundles of {CPU: 2, GPU: 1} on "
        "one host (free now: host-0 CPU: 96, GPU: 8; host-1 CPU: 96, GPU: 8; desk CPU: 8, GPU: 0)"
    )
    two = [Host("a1", {"CPU": 0.5}, "10.0.0.1"), Host("b2", {}, "10.0.0.2")]
    with pytest.raises(ClusterTooSmall, match=r"free now: 10.0.0.1 CPU: 0.5; 10.0.0.2 CPU: 0\)"):
        assign_hosts(preset("local"), two)
    with pytest.raises(ClusterTooSmall, match="the cluster has no host"):
        assign_hosts(preset("local"), [])


def test_ranks_of_a_node_never_split_over_hosts() -> None:
    with pytest.raises(ClusterTooSmall, match="no room for 1 of 1 prefill nodes"):
        assign_hosts(preset("qwen-tp"), gpu_hosts(50, gpus=7))


def test_settings_become_kinds_of_nodes_that_there_are_any_of() -> None:
    overrides = {
        "deployment.decode": 2,
        "deployment.decode.dp": 2,
        "deployment.decode.ep": True,
        "deployment.decode.cpus": 0.5,
        "engine.kv_layout": "nhd",
    }
    deployment = deployment_of(load_settings(None, overrides))
    assert deployment.name == "this deployment"
    assert deployment.kinds == (
        NodeKind(Role.PREFILL, 1, ParallelLayout(1, KvLayout.NHD)),
        NodeKind(Role.DECODE, 2, ParallelLayout(1, KvLayout.NHD, 2), RankResources(cpus=0.5), ep=True),
    )
    assert (deployment.amount("CPU"), deployment.amount("GPU")) == (3, 0)
    baseline = deployment_of(load_settings(None, {"deployment.colocated": 3}))
    assert [(kind.role, kind.count) for kind in baseline.kinds] == [(Role.COLOCATED, 3)]


def test_the_large_expert_parallel_deployment_has_its_shape() -> None:
    shapes = [(kind.count, kind.parallel.tp, kind.parallel.dp, kind.ep) for kind in preset("r1-dp").kinds]
    assert shapes == [(3, 8, 1, True), (1, 1, 8, True)]


@given(
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([1, 2, 4]),
    st.lists(st.integers(0, 8), max_size=5),
)
def test_every_node_gets_one_host_and_no_host_is_overcommitted(
    prefill: int, decode: int, ranks: int, cpus: list[int]
) -> None:
    shape = ParallelLayout(ranks)
    deployment = Deployment("own", (NodeKind(Role.PREFILL, prefill, shape), NodeKind(Role.DECODE, decode, shape)))
    hosts = [Host(f"h{k}", {"CPU": free}) for k, free in enumerate(cpus)]
    room = sum(free // ranks for free in cpus)
    if room < prefill + decode:
        with pytest.raises(ClusterTooSmall):
            assign_hosts(deployment, hosts)
        return
    groups = assign_hosts(deployment, hosts)
    assert sorted(group.name for group in groups) == sorted(
        [f"prefill-{k}" for k in range(prefill)] + [f"decode-{k}" for k in range(decode)]
    )
    for host in hosts:
        taken = [bundle["CPU"] for group in groups if group.host == host.id for bundle in group.bundles]
        assert sum(taken) <= host.free["CPU"]


def test_presets_bear_their_names() -> None:
    assert all(preset(name).name == name for name in PRESETS)
