"""The engine on a real (tiny, random) Llama: a request's tokens depend on the request alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pdserve.config import EngineSettings
from pdserve.engine.engine import Engine
from pdserve.engine.hooks import Chunk, PrefillJob
from pdserve.engine.limits import page_geometry
from pdserve.engine.local import Collector, generate, local_engine
from pdserve.kv.memory import KvMemory
from pdserve.kv.pool import PagePool
from pdserve.models.decoder import Decoder
from pdserve.models.load import load_model
from pdserve.types import GenerationRequest, RequestId, Role, SamplingParams
from tests.pdserve.engine.toy import eventually
from tests.pdserve.models.tiny import VOCAB, make_tiny_llama

LENGTHS = (1, 2, 7, 8, 9, 31, 32, 33, 64, 65, 100)
ROOMY = EngineSettings(dtype="fp32", page_size=8, chunk_tokens=32, max_batch=16, kv_cache_tokens=4096)


loaded_dtypes: dict[int, str] = {}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("engine") / "tiny-llama")


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = tmp_path_factory.mktemp("engine") / f"tiny-llama-{request.param}"
    loaded = load_model(make_tiny_llama(directory, dtype=request.param), request.param)
    loaded_dtypes[id(loaded)] = request.param
    return loaded


def settings_for(model: Decoder, **changes: object) -> EngineSettings:
    return ROOMY.model_copy(update={"dtype": loaded_dtypes[id(model)], **changes})


def requests_of(**sampling: object) -> list[GenerationRequest]:
    params = SamplingParams(**{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return [
        GenerationRequest(
            RequestId(f"r{length}"),
            tuple(np.random.default_rng(length).integers(0, VOCAB, length).tolist()),
            params,
        )
        for length in LENGTHS
    ]


def answers_of(
    model: Decoder, requests: list[GenerationRequest], **changes: object
) -> dict[RequestId, tuple[int, ...]]:
    with local_engine(model, settings_for(model, **changes)) as engine:
        answers = generate(engine, requests, 60.0)
        assert engine.pool.free_pages == engine.pool.total
        if "kv_cache_tokens" in changes:
            assert engine.stats().preemptions > 0
    return answers


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 11}], ids=["greedy", "seeded"])
def test_tokens_do_not_depend_on_company_chunks_or_pages(model: Decoder, sampling: dict[str, object]) -> None:
    requests = requests_of(**sampling)
    alone = answers_of(model, requests, max_batch=1)
    assert len(set(alone.values())) == len(alone) and all(len(answer) == 24 for answer in alone.values())
    assert answers_of(model, requests) == alone, "in one batch"
    assert answers_of(model, requests[::-1], chunk_tokens=8) == alone, "in other chunks, in another order"
    assert answers_of(model, requests, kv_cache_tokens=160) == alone, "recomputed after preemption"
    assert answers_of(model, requests, page_size=16, chunk_tokens=64) == alone, "in other pages"


def test_prefill_and_decode_engines_equal_the_colocated_one(model: Decoder) -> None:
    requests, settings = requests_of(), settings_for(model)
    colocated = answers_of(model, requests)
    done: set[RequestId] = set()

    class Hooks:
        def step_started(self, chunks: tuple[Chunk, ...], counter_base: int) -> None: ...
        def step_finished(self, chunks: tuple[Chunk, ...]) -> None:
            done.update(chunk.job_id for chunk in chunks if chunk.last)

        def job_failed(self, job_id: RequestId, error: Exception) -> None:
            raise error

        def job_cancelled(self, job_id: RequestId) -> None: ...

    geometry = page_geometry(model.config, settings)
    pool, collector = PagePool(geometry.pages), Collector()
    pages = {request.request_id: pool.allocate(geometry.pages_for(len(request.prompt) - 1)) for request in requests}
    with KvMemory(geometry) as memory:
        memory.blocks[...] = 0x7FC0 if settings.dtype == "bf16" else np.nan
        with Engine(model, memory, pool, settings, Role.PREFILL, prefill_hooks=Hooks()) as prefill:
            for request in requests[1:]:
                prefill.prefill(PrefillJob(request.request_id, request.prompt[:-1], pages[request.request_id]))
            eventually(lambda: len(done) == len(requests) - 1, 30)
        with Engine(model, memory, pool, settings, Role.DECODE, decode_hooks=collector) as decode:
            for request in requests:
                decode.submit_ready(request, pages[request.request_id])
            for request in requests:
                collector.finish(request.request_id)
                assert collector.tokens(request.request_id) == colocated[request.request_id]
    assert pool.counts() == (pool.total, 0, 0)


@pytest.mark.parametrize("model", ["fp32"], indirect=True)
def test_greedy_tokens_equal_transformers(model: Decoder, checkpoint: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for request in requests_of():
        prompt = torch.tensor([request.prompt])
        output = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        assert answers_of(model, [request])[request.request_id] == tuple(output[0, len(request.prompt) :].tolist())
