"""Real clusters: Ray, actors in processes of their own, libfabric between them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayError

from actors.ingress import IngressSpec, RayBackend
from actors.launch import Cluster, launch
from pdserve.config import load_settings
from pdserve.types import GenerationRequest, RequestId, SequenceOutput
from tests.pdserve.models.tiny import make_tiny_llama

TINY_ENGINE = {
    "engine.dtype": "fp32",
    "engine.page_size": 16,
    "engine.chunk_tokens": 64,
    "engine.kv_cache_tokens": 8192,
    "http.port": 0,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small, yet with enough layers and context that a long prompt takes a while."""
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=6, context=4096)


@pytest.fixture(scope="module")
def cluster(tiny_model: Path) -> Iterator[Cluster]:
    """One prefill and two decode nodes, with HTTP."""
    settings = {"model.path": str(tiny_model), "deployment.prefill": 1, "deployment.decode": 2, **TINY_ENGINE}
    with launch(load_settings(None, settings)) as started:
        pids = {card.pid for card in started.cards().values()}
        yield started
    assert_nothing_left(pids)


def assert_nothing_left(pids: set[int]) -> None:
    """Neither the nodes' processes nor what their transports keep in /dev/shm."""
    assert pids
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists(), f"process {pid} is still there"
        assert not list(Path("/dev/shm").glob(f"{pid}:*")), f"process {pid} left files in /dev/shm"


def backend_of(cluster: Cluster) -> RayBackend:
    """What an HTTP replica uses; to be made and used in one event loop."""
    return RayBackend(IngressSpec(cluster.model_path, cluster.model_name, cluster.max_model_len))


def generate_all(cluster: Cluster, requests: list[GenerationRequest]) -> dict[RequestId, list[SequenceOutput]]:
    """All at once, through the actors; every output of each."""

    async def one(backend: RayBackend, request: GenerationRequest) -> list[SequenceOutput]:
        return [output async for output in backend.generate(request)]

    async def run() -> dict[RequestId, list[SequenceOutput]]:
        backend = backend_of(cluster)
        answers = await asyncio.gather(*(one(backend, request) for request in requests))
        return {request.request_id: answer for request, answer in zip(requests, answers, strict=True)}

    return asyncio.run(run())


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """The condition's first true value; a node that is being restarted makes it false."""
    deadline = time.monotonic() + timeout_s
    while True:
        value: Any = None
        with contextlib.suppress(RayError):
            value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"did not come true in {timeout_s} s: {what}"
        time.sleep(0.05)


def pools_are_whole(cluster: Cluster) -> bool:
    """No page is used or quarantined on any node."""
    return all(values["kv_cache_free_pages"] == values["kv_cache_total_pages"] for values in cluster.metrics().values())
