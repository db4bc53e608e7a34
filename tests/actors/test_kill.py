"""kill -9 of a node in mid-transfer: nothing hangs, nothing leaks, other streams go on, and the node comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

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

PREFILL = NodeId("prefill-0")


@pytest.fixture(scope="module")
def pair(tiny_model: Path) -> Iterator[Cluster]:
    settings = {"model.path": str(tiny_model), "deployment.prefill": 1, "deployment.decode": 2, **TINY_ENGINE}
    with launch(load_settings(None, settings), http=False) as started:
        pids = {card.pid for card in started.cards().values()}
        yield started
        pids |= {card.pid for card in started.cards().values()}
    assert_nothing_left(pids)


def request(name: str, prompt: int, max_tokens: int) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(RequestId(name), tuple(range(1, 200)) * (prompt // 199) + (7,) * (prompt % 199), sampling)


def test_a_killed_prefill_node(pair: Cluster) -> None:
    victim = pair.cards()[PREFILL]
    truth = tokens_of(generate_all(pair, [request("truth", 3_000, 8)])[RequestId("truth")])

    async def scenario() -> tuple[list[SequenceOutput], list[SequenceOutput]]:
        backend = backend_of(pair)
        # The bystander decodes for as long as the node is away.
        bystander = asyncio.create_task(_collect(backend, request("bystander", 40, 900)))
        await asyncio.sleep(0.2)
        written = await _writes(pair)
        struck = asyncio.create_task(_collect(backend, request("struck", 3_000, 8)))
        while await _writes(pair) < written + 20:  # its pages are on their way
            await asyncio.sleep(0.002)
        os.kill(victim.pid, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(struck, bystander), 120)

    struck, bystander = asyncio.run(scenario())
    assert bystander[-1].finish is FinishReason.LENGTH and len(tokens_of(bystander)) == 900
    assert struck[-1].finish is FinishReason.LENGTH, struck[-1].error
    assert tokens_of(struck) == truth
    trace = pair.trace(RequestId("struck"))
    assert trace is not None and trace.attempt >= 2
    assert pair.cards()[PREFILL].incarnation != victim.incarnation
    eventually(lambda: pools_are_whole(pair), "all pages are free")
    again = generate_all(pair, [request("again", 100, 4)])[RequestId("again")]
    assert again[-1].finish is FinishReason.LENGTH


def test_a_killed_decode_node(pair: Cluster) -> None:
    """The ingress keeps prompt and streamed tokens; the other decode node takes both as a new prompt."""
    truth = tokens_of(generate_all(pair, [request("truth-2", 300, 400)])[RequestId("truth-2")])
    before = pair.cards()

    async def scenario() -> tuple[list[int], NodeId]:
        backend = backend_of(pair)
        tokens: list[int] = []
        victim: NodeId | None = None
        async for output in backend.generate(request("moved", 300, 400)):
            assert output.error is None
            tokens += output.tokens
            if victim is None and len(tokens) >= 20:
                victim = backend.home_of(RequestId("moved"))
                assert victim is not None
                os.kill(before[victim].pid, signal.SIGKILL)
        assert victim is not None
        return tokens, victim

    tokens, victim = asyncio.run(asyncio.wait_for(scenario(), 120))
    assert tokens == truth
    eventually(lambda: pair.cards()[victim].incarnation != before[victim].incarnation, "the node is back")
    eventually(lambda: all(s.usable for s in ray.get(pair.scheduler.nodes.remote())), "all nodes are verified")
    eventually(lambda: pools_are_whole(pair), "all pages are free")
    many = [request(f"after-{i}", 100, 4) for i in range(4)]
    assert all(outputs[-1].finish is FinishReason.LENGTH for outputs in generate_all(pair, many).values())


async def _collect(backend, asked: GenerationRequest) -> list[SequenceOutput]:  # type: ignore[no-untyped-def]
    return [output async for output in backend.generate(asked)]


async def _writes(pair: Cluster) -> float:
    values = await pair.nodes[PREFILL].metrics.remote()
    return values.get("kv_transfer_writes_completed_total", 0)
