"""A cluster of several raylets: a host is lost, with all that ran on it, and its streams go on elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as Raylets

from actors.ingress import RayBackend
from actors.launch import Cluster, launch
from actors.local_ray import descendants
from pdserve.config import load_settings
from pdserve.engine.local import generate, local_engine
from pdserve.models.load import load_model
from pdserve.types import GenerationRequest, NodeId, RequestId, SamplingParams
from tests.actors.conftest import backend_of, eventually, pools_are_whole
from tests.hosts.ray_hosts import ENVIRONMENT, OBJECT_STORE_BYTES
from tests.pdserve.models.tiny import make_tiny_llama

pytestmark = pytest.mark.slow

ENGINE = {
    "engine.dtype": "fp32",
    "engine.page_size": 16,
    "engine.chunk_tokens": 64,
    "engine.kv_cache_tokens": 8192,
}
ANSWER = 400
STREAMS = 3  # at least, when the host goes
RAYLET = {"num_cpus": 4, "num_gpus": 0, "object_store_memory": OBJECT_STORE_BYTES}


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    """Three: the head's, which this process joins, and two more."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        started = Raylets(initialize_head=True, head_node_args={**RAYLET, "include_dashboard": False})
        try:
            for _ in range(2):
                started.add_node(**RAYLET)
            started.wait_for_nodes()
            yield started
        finally:
            started.shutdown()


@pytest.fixture(scope="module")
def cluster(raylets: Raylets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and two decode nodes, each on a raylet of its own."""
    model = make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=6, context=4096)
    wanted = {"model.path": str(model), "ray_address": raylets.address, "deployment.decode": 2, **ENGINE}
    with launch(load_settings(None, wanted), http=False) as started:
        yield started


def request(name: RequestId) -> GenerationRequest:
    prompt = (*name.encode(), *range(1, 200), *range(1, 100))
    return GenerationRequest(name, prompt, SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True))


def test_streams_of_a_lost_host_go_on_at_the_other_decode_node(cluster: Cluster, raylets: Raylets) -> None:
    before = cluster.cards()
    assert {_raylet_of(card.pid) for card in before.values()} == {_pid(node) for node in raylets.list_all_nodes()}
    elsewhere = {node for node, card in before.items() if _raylet_of(card.pid) != _pid(raylets.head_node)}

    async def scenario() -> tuple[dict[RequestId, list[int]], NodeId]:
        backend = backend_of(cluster)
        tokens: dict[RequestId, list[int]] = {}
        streams = []
        struck: RequestId | None = None
        while struck is None or len(tokens) < STREAMS:  # which decode node one comes to is partly chance
            name = RequestId(f"r{len(tokens)}")
            tokens[name] = []
            streams.append(asyncio.create_task(_collect(backend, name, tokens[name])))
            while not tokens[name]:
                await asyncio.sleep(0.001)
            struck = name if backend.home_of(name) in elsewhere else struck
        victim = backend.home_of(struck)
        assert victim is not None and len(tokens[struck]) < ANSWER / 2
        _lose_host(raylets, _raylet_of(before[victim].pid))
        await asyncio.wait_for(asyncio.gather(*streams), 60)
        return tokens, victim

    tokens, victim = asyncio.run(scenario())
    with local_engine(load_model(cluster.model_path, "fp32"), cluster.settings.engine) as engine:
        truth = generate(engine, [request(name) for name in tokens])
    assert {name: tuple(got) for name, got in tokens.items()} == truth
    eventually(lambda: cluster.cards()[victim].incarnation != before[victim].incarnation, "the node is back")
    eventually(lambda: all(s.usable for s in ray.get(cluster.scheduler.nodes.remote())), "all nodes are verified")
    left = {_pid(node) for node in raylets.list_all_nodes()}
    assert _raylet_of(cluster.cards()[victim].pid) in left and len(left) == 2
    eventually(lambda: pools_are_whole(cluster), "all pages are free")


async def _collect(backend: RayBackend, name: RequestId, tokens: list[int]) -> None:
    async for output in backend.generate(request(name)):
        assert output.error is None
        tokens += output.tokens


def _lose_host(raylets: Raylets, raylet: int) -> None:
    """As if its power had gone: the raylet and all that it started end at once, and nobody says goodbye."""
    (lost,) = (node for node in raylets.list_all_nodes() if _pid(node) == raylet)
    for pid in (raylet, *descendants(raylet)):
        os.kill(pid, signal.SIGKILL)
    raylets.remove_node(lost, allow_graceful=False)  # for what is beside the raylet, and so that no zombie is left


def _raylet_of(pid: int) -> int:
    """Ray's workers are children of their raylet."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _pid(node: Any) -> int:
    (raylet,) = node.all_processes["raylet"]
    return int(raylet.process.pid)
