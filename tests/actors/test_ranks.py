"""The ranks of a node as actors: who opens a transport, and what a lost rank does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.launch import Cluster, launch
from pdserve.config import load_settings
from pdserve.types import FinishReason, GenerationRequest, NodeId, RequestId, SamplingParams, SequenceOutput
from tests.actors.conftest import (
    TINY_ENGINE,
    assert_nothing_left,
    backend_of,
    eventually,
    generate_all,
    pools_are_whole,
    tokens_of,
)

ANSWER = 250
PREFILL = NodeId("prefill-0")


@pytest.fixture(scope="module")
def sharded(tiny_model: Path) -> Iterator[Cluster]:
    """Every node has two ranks."""
    keys: dict[str, Any] = {"deployment.prefill.tp": 2, "deployment.decode": {"count": 2, "tp": 2}}
    with launch(load_settings(None, {"model.path": str(tiny_model), **keys, **TINY_ENGINE}), http=False) as started:
        pids = all_pids(started)
        yield started
        pids |= all_pids(started)
    assert_nothing_left(pids)


def rank_pids(cluster: Cluster) -> dict[NodeId, int]:
    """Of each node's second rank."""
    return {node: ray.get(handle.rank_pids.remote())[1] for node, handle in cluster.nodes.items()}


def all_pids(cluster: Cluster) -> set[int]:
    return {card.pid for card in cluster.cards().values()} | set(rank_pids(cluster).values())


def request(name: str, tokens: int = ANSWER) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(RequestId(name), tuple(range(1, 60)), sampling)


def everything_is_ready(cluster: Cluster) -> bool:
    snapshots = ray.get(cluster.scheduler.nodes.remote())
    return len(snapshots) == len(cluster.nodes) and all(snapshot.usable for snapshot in snapshots)


def assert_gone(*pids: int) -> None:
    eventually(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], f"{pids} have ended")


def test_only_the_leader_opens_a_transport(sharded: Cluster) -> None:
    generate_all(sharded, [request("before", 4)])
    for node, pid in rank_pids(sharded).items():
        leader = Path(f"/proc/{sharded.cards()[node].pid}/maps").read_text()
        rank = Path(f"/proc/{pid}/maps").read_text()
        assert "libfabric" in leader and leader.count("pdserve-kv") >= 2, "it maps its own pages and the other rank's"
        assert "libfabric" not in rank and "libucp" not in rank and "pdserve-kv" in rank


def test_a_decode_node_that_loses_a_rank_fails_and_returns_as_one(sharded: Cluster) -> None:
    truth = tokens_of(generate_all(sharded, [request("truth")])[RequestId("truth")])
    cards, ranks = sharded.cards(), rank_pids(sharded)

    async def scenario() -> tuple[NodeId, list[list[SequenceOutput]]]:
        backend, seen = backend_of(sharded), {"a": asyncio.Event(), "b": asyncio.Event()}

        async def collect(name: str) -> list[SequenceOutput]:
            outputs = []
            async for output in backend.generate(request(name)):
                outputs.append(output)
                seen[name].set()
            return outputs

        streams = [asyncio.create_task(collect(name)) for name in seen]
        for event in seen.values():
            await event.wait()
        victim, other = (backend.home_of(RequestId(name)) for name in seen)
        assert victim is not None and other is not None and victim != other
        os.kill(ranks[victim], signal.SIGKILL)
        return victim, await asyncio.wait_for(asyncio.gather(*streams), 120)

    victim, streams = asyncio.run(scenario())
    for outputs in streams:  # one of them went on elsewhere, in mid-answer
        assert outputs[-1].finish is FinishReason.LENGTH, outputs[-1].error
        assert tokens_of(outputs) == truth
    eventually(lambda: everything_is_ready(sharded), "all nodes are verified")
    assert_gone(cards[victim].pid, ranks[victim])
    for node, now in sharded.cards().items():
        assert (now.pid != cards[node].pid) == (now.incarnation != cards[node].incarnation) == (node == victim)
        assert (rank_pids(sharded)[node] != ranks[node]) == (node == victim)
    eventually(lambda: pools_are_whole(sharded), "all pages are free")
    again = generate_all(sharded, [request(f"again-{number}") for number in range(4)])
    assert all(tokens_of(outputs) == truth for outputs in again.values())


def test_a_prefill_node_that_loses_a_rank_while_prompts_wait(sharded: Cluster) -> None:
    truth = tokens_of(generate_all(sharded, [request("truth2", 20)])[RequestId("truth2")])
    before, rank = sharded.cards(), rank_pids(sharded)[PREFILL]
    os.kill(rank, signal.SIGKILL)
    answers = generate_all(sharded, [request(f"struck-{number}", 20) for number in range(4)])
    assert all(tokens_of(outputs) == truth for outputs in answers.values()), answers
    eventually(lambda: everything_is_ready(sharded), "all nodes are verified")
    assert_gone(before[PREFILL].pid, rank)
    assert {node for node, card in sharded.cards().items() if card.pid != before[node].pid} == {PREFILL}
    eventually(lambda: pools_are_whole(sharded), "all pages are free")
