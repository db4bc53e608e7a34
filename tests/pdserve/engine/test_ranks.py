"""Engines whose model is computed by several processes: answers, page memory, and what a lost rank does."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.attention.batch import RaggedBatch
from pdserve.config import EngineSettings
from pdserve.engine.engine import Engine
from pdserve.engine.local import Collector
from pdserve.engine.ranks.leader import NodeRanks
from pdserve.engine.ranks.steps import EMPTY_STEP, decode_step, encode_step
from pdserve.errors import RankLost
from pdserve.kv.pool import PagePool
from pdserve.parallel.gloo import RankLayout
from pdserve.types import FinishReason, GenerationRequest, RequestId, Role, SamplingParams
from tests.pdserve.engine.rank_processes import node_of
from tests.pdserve.engine.toy import eventually
from tests.pdserve.models.passes import prompt_of, reference_of
from tests.pdserve.models.tiny_families import make_tiny

SETTINGS = EngineSettings(dtype="fp32", page_size=8, chunk_tokens=16, max_batch=4, kv_cache_tokens=512)
SAMPLING = SamplingParams(max_tokens=10, min_tokens=10, temperature=0.0)
LENGTHS = (1, 8, 33, 70)

CASES: dict[str, tuple[str, dict[str, Any], RankLayout, dict[str, Any]]] = {
    "qwen3 tp2": ("qwen3", {}, RankLayout(tp=2), {}),
    "qwen3 tp2 nhd": ("qwen3", {}, RankLayout(tp=2), {"kv_layout": "nhd"}),
    "qwen3 tp4, copied heads": ("qwen3", {}, RankLayout(tp=4), {}),
    "deepseek tp2": ("deepseek", {}, RankLayout(tp=2), {}),
    "deepseek dp2": ("deepseek", {}, RankLayout(dp=2), {}),
    "deepseek dp2 ep2": ("deepseek", {}, RankLayout(dp=2, ep=True), {}),
    "qwen3_moe tp2 ep2": ("qwen3_moe", {}, RankLayout(tp=2, ep=True), {}),
    "deepseek tp2 dp2 ep4": ("deepseek", {}, RankLayout(tp=2, dp=2, ep=True), {}),
}
IN_EVERY_RUN = {"qwen3 tp2", "deepseek dp2 ep2"}


def requests_of(replica: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(RequestId(f"{replica}-{length}"), tuple(prompt_of(length, length + replica)), SAMPLING)
        for length in LENGTHS
    ]


def engine_of(ranks: NodeRanks, replica: int, settings: EngineSettings) -> Engine:
    model = ranks.replicas[replica]
    memory = ranks.memories[replica * ranks.layout.tp]
    hooks, pool = Collector(), PagePool(settings.pages)
    return Engine(
        model, memory, pool, settings, Role.COLOCATED, decode_hooks=hooks, layer_counter=model.layer_counter
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in CASES]
)
def test_replicas_answer_at_the_same_time_as_transformers_do(name: str, tmp_path: Path) -> None:
    family, changes, layout, engine = CASES[name]
    directory, settings = make_tiny(family, tmp_path / "model", seed=5, **changes), SETTINGS.model_copy(update=engine)
    with node_of(layout, directory, settings) as (ranks, others), ExitStack() as stack:
        engines = [stack.enter_context(engine_of(ranks, replica, settings)) for replica in range(layout.dp)]
        asked = [(engine, request) for number, engine in enumerate(engines) for request in requests_of(number)]
        for engine_, request in asked:
            engine_.submit(request)
        for engine_, request in asked:
            collector: Any = engine_.decode_hooks
            assert collector.finish(request.request_id).finish is FinishReason.LENGTH
            assert collector.tokens(request.request_id) == tuple(reference_of(directory, request.prompt, 10)[1])
        for number, memory in enumerate(ranks.memories):
            assert np.count_nonzero(memory.blocks), f"rank {number} has pages of its own, mapped here"
    assert [process.returncode for process in others] == [0] * (layout.ranks - 1)


def test_a_lost_rank_fails_the_step_and_every_later_one(tmp_path: Path) -> None:
    directory = make_tiny("qwen3", tmp_path / "model")
    with node_of(RankLayout(tp=2), directory, SETTINGS) as (ranks, others), engine_of(ranks, 0, SETTINGS) as engine:
        collector: Any = engine.decode_hooks
        others[0].send_signal(signal.SIGKILL)
        eventually(lambda: ranks.lost is not None, 20)
        assert ranks.lost == f"rank 1 (process {others[0].pid}) has ended"
        engine.submit(requests_of(0)[1])
        last = collector.finish(RequestId("0-8"))
        assert last.finish is FinishReason.ERROR and "RankLost: rank 1 " in last.error


def test_a_rank_that_cannot_start_says_why(tmp_path: Path) -> None:
    directory = make_tiny("qwen3", tmp_path / "model", num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(Exception, match="3 heads, which 2 tensor-parallel ranks cannot share"):  # noqa: SIM117
        with node_of(RankLayout(tp=2), directory, SETTINGS):
            pass


def test_only_the_leader_opens_a_transport(tmp_path: Path) -> None:
    with node_of(RankLayout(tp=2), make_tiny("qwen3", tmp_path / "model"), SETTINGS) as (_, others):
        mapped = Path(f"/proc/{others[0].pid}/maps").read_text()
        assert "libfabric" not in mapped and "libucp" not in mapped and "pdserve-kv" in mapped


def test_steps_survive_the_way_as_bytes() -> None:
    batch = RaggedBatch(
        np.array([5, 6, 7]), np.array([0, 1, 3]), np.array([9, 0]), np.array([[3, 4], [8, 0]]), np.array([0])
    )
    for given in (batch, EMPTY_STEP):
        read = decode_step(encode_step(given))
        for name in RaggedBatch.__slots__:
            assert np.array_equal(getattr(read, name), getattr(given, name)), name
            assert getattr(read, name).dtype == np.int64 and getattr(read, name).flags.writeable


def test_no_step_is_begun_after_a_loss(tmp_path: Path) -> None:
    with node_of(RankLayout(tp=2), make_tiny("qwen3", tmp_path / "model"), SETTINGS) as (ranks, _):
        ranks.lose("it seemed so")
        with pytest.raises(RankLost, match="it seemed so"):
            ranks.forward(0, EMPTY_STEP)
