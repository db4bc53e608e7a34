"""Nodes of several ranks and replicas, end to end over real actors and libfabric, on tiny random checkpoints.

Greedy tokens in fp32 equal transformers' and those of one colocated rank; immediates are as many as the plan says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as Raylets

from actors.launch import Cluster, launch
from actors.names import node_of
from pdserve.config import Settings, load_settings
from pdserve.engine.local import generate, local_engine
from pdserve.models.load import load_model
from pdserve.types import GenerationRequest, NodeId, RequestId, SamplingParams
from policies.sharding import expected_count, pages_sent
from tests.actors.conftest import (
    TINY_ENGINE,
    assert_nothing_left,
    backend_of,
    eventually,
    generate_all,
    pools_are_whole,
    tokens_of,
)
from tests.pdserve.models.passes import prompt_of, reference_of
from tests.pdserve.models.tiny_families import make_tiny

PAGE, CHUNK, ANSWER = 8, 16, 10
LENGTHS = (1, 2, PAGE, PAGE + 1, CHUNK + 1, 33, 50, 70)
SIZES = {"engine.page_size": PAGE, "engine.chunk_tokens": CHUNK, "engine.kv_cache_tokens": 1024}
PREFILL, DECODE = NodeId("prefill-0"), NodeId("decode-0")


@dataclass(frozen=True)
class Case:
    family: str
    prefill: dict[str, Any]
    decode: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)  # changes of config.json
    kv_layout: str = "hnd"


TP1, TP2, TP4, DP2 = {"tp": 1}, {"tp": 2}, {"tp": 4}, {"dp": 2}
EP_TP2, EP_DP2 = {"tp": 2, "ep": True}, {"dp": 2, "ep": True}
CASES = {
    "gqa tp2 to tp2": Case("qwen3", TP2, TP2),
    "gqa tp2 to tp1": Case("qwen3", TP2, TP1),
    "gqa tp1 to tp2": Case("qwen3", TP1, TP2),
    "gqa tp4 to tp2, 4 heads": Case("qwen3", TP4, TP2, {"num_key_value_heads": 4}),
    "gqa tp4 to tp2, 2 heads, copied": Case("qwen3", TP4, TP2, {"num_key_value_heads": 2}),
    "gqa tp2 to tp1, nhd": Case("qwen3", TP2, TP1, kv_layout="nhd"),
    "gqa tp2 to dp2": Case("qwen3", TP2, DP2),
    "mla tp2 to tp2": Case("deepseek", TP2, TP2),
    "mla tp2 to dp2": Case("deepseek", TP2, DP2),
    "mla dp2/ep2 to dp2/ep2": Case("deepseek", EP_DP2, EP_DP2),
    "mla tp2 dp2 to dp2/ep2": Case("deepseek", TP2 | DP2, EP_DP2),
    "moe tp2 to tp2": Case("qwen3_moe", TP2, TP2),
    "moe ep2 to ep2": Case("qwen3_moe", EP_TP2, EP_TP2),
}
IN_EVERY_RUN = {("gqa tp2 to tp1", "tcp"), ("mla dp2/ep2 to dp2/ep2", "shm")}
ALL = [
    pytest.param(*chosen, id=", ".join(chosen), marks=() if chosen in IN_EVERY_RUN else pytest.mark.slow)
    for chosen in product(CASES, ("tcp", "shm"))
]


@pytest.fixture(scope="module")
def raylet() -> Iterator[Raylets]:
    """One Ray for all: what a case starts in it is gone before the next one."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RAY_AUTH_MODE", "disabled"), ("RAY_USAGE_STATS_ENABLED", "0")):
            patch.setenv(name, value)
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        started = Raylets(
            True, head_node_args={"num_cpus": 8, "include_dashboard": False, "object_store_memory": 80 << 20}
        )
        try:
            yield started
        finally:
            ray.shutdown()
            started.shutdown()


def settings_of(case: Case, model: Path, provider: str, raylet: Raylets) -> Settings:
    keys = {
        "ray_address": raylet.address,
        "model.path": str(model),
        "deployment.prefill": {"count": 1, **case.prefill},
        "deployment.decode": {"count": 1, **case.decode},
        "engine.kv_layout": case.kv_layout,
        "transport.provider": provider,
    }
    return load_settings(None, TINY_ENGINE | SIZES | keys)


def requests() -> list[GenerationRequest]:
    sampling = SamplingParams(max_tokens=ANSWER, min_tokens=ANSWER, temperature=0.0)
    return [GenerationRequest(RequestId(f"r-{n}"), tuple(prompt_of(n, seed=n)), sampling) for n in LENGTHS]


def all_pids(cluster: Cluster) -> set[int]:
    """Of leaders and of their other ranks."""
    others = ray.get([handle.rank_pids.remote() for handle in cluster.nodes.values()])
    return {card.pid for card in cluster.cards().values()} | {pid for pids in others for pid in pids.values()}


def check_transfers(cluster: Cluster, asked: list[GenerationRequest], provider: str) -> None:
    """Each as counted beforehand, by replicas whose links are their own."""
    prefill, decode = cluster.cards()[PREFILL], cluster.cards()[DECODE]
    for request in asked:
        trace = cluster.trace(request.request_id)
        pages = pages_sent(len(request.prompt) - 1, PAGE)
        if not pages:
            assert trace is None
            continue
        groups = [(group, pages) for group in decode.groups]
        expected = expected_count(groups, prefill.parallel, decode.parallel, PAGE)
        assert trace is not None and (node_of(trace.prefill), trace.provider) == (PREFILL, provider)
        assert trace.writes_counted == trace.writes_expected == expected


def check_metrics(cluster: Cluster, case: Case) -> None:
    """Sums over replicas; links between each two of them."""
    metrics = cluster.metrics()
    replicas = {node: side.get("dp", 1) for node, side in ((PREFILL, case.prefill), (DECODE, case.decode))}
    pages = cluster.settings.engine.pages
    for node, count in replicas.items():
        assert metrics[node]["engine_replicas"] == count
        assert metrics[node]["kv_cache_total_pages"] == count * pages
        assert metrics[node]["kv_transfer_links_open"] == replicas[PREFILL] * replicas[DECODE]
    assert metrics[PREFILL]["kv_transfer_writes_completed_total"] == metrics[PREFILL]["kv_transfer_writes_posted_total"]


def leave_in_mid_answer(cluster: Cluster) -> None:
    """A client that has enough: whichever replica has the request, it ends there."""

    async def scenario() -> None:
        backend = backend_of(cluster)
        sampling = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        for number in range(2):
            answer = backend.generate(GenerationRequest(RequestId(f"left-{number}"), (5, 6, 7), sampling))
            async for _ in answer:
                break
            assert not await asyncio.to_thread(pools_are_whole, cluster)
            await answer.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize(("name", "provider"), ALL)
def test_answers_are_those_of_one_rank_and_of_transformers(
    name: str, provider: str, raylet: Raylets, tmp_path: Path
) -> None:
    case, asked = CASES[name], requests()
    model = make_tiny(case.family, tmp_path / "model", seed=5, **case.model)
    settings = settings_of(case, model, provider, raylet)
    with local_engine(load_model(model, "fp32"), settings.engine) as engine:
        colocated = generate(engine, asked)
    with launch(settings, http=False) as cluster:
        pids = all_pids(cluster)
        assert len(pids) == sum(side.get("tp", 1) * side.get("dp", 1) for side in (case.prefill, case.decode))
        answers = generate_all(cluster, asked)
        for request in asked:
            tokens = tokens_of(answers[request.request_id])
            assert tuple(tokens) == colocated[request.request_id], request.request_id
            assert tokens == reference_of(model, request.prompt, ANSWER)[1], request.request_id
        check_transfers(cluster, asked, provider)
        check_metrics(cluster, case)
        leave_in_mid_answer(cluster)
        eventually(lambda: pools_are_whole(cluster), "all pages are free")
    assert_nothing_left(pids)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP2, EP_DP2, TP2 | EP_DP2], ids=["tp2", "dp2/ep2", "tp2 dp2/ep4"])
def test_colocated_nodes_of_several_ranks_answer_the_same(
    layout: dict[str, Any], raylet: Raylets, tmp_path: Path
) -> None:
    model, asked = make_tiny("deepseek", tmp_path / "model", seed=5), requests()
    keys = {"ray_address": raylet.address, "model.path": str(model), "deployment.colocated": {"count": 1, **layout}}
    with launch(load_settings(None, TINY_ENGINE | SIZES | keys), http=False) as cluster:
        pids = all_pids(cluster)
        answers = generate_all(cluster, asked)
        for request in asked:
            tokens = tokens_of(answers[request.request_id])
            assert tokens == reference_of(model, request.prompt, ANSWER)[1], request.request_id
        leave_in_mid_answer(cluster)
        eventually(lambda: pools_are_whole(cluster), "all pages are free")
    assert_nothing_left(pids)
