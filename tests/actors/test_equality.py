"""Prefill/decode over real actors and libfabric against the colocated engine and transformers, on the embedded model.

Token for token, 64 tokens each, over tcp and over shm: fp32 equals transformers and colocated, bf16 equals colocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from actors.launch import Cluster, launch
from pdserve.config import EngineSettings, Settings, load_settings
from pdserve.engine.local import generate, local_engine
from pdserve.models.embedded import embedded_model_dir
from pdserve.models.load import load_model
from pdserve.text import Tokenizer
from pdserve.types import GenerationRequest, RequestId, SamplingParams
from policies.sharding import pages_sent
from tests.actors.conftest import eventually, generate_all, pools_are_whole, tokens_of

pytestmark = pytest.mark.slow

PAGE, CHUNK, CONTEXT, ANSWER = 16, 128, 1024, 64
LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, CONTEXT - ANSWER)
TEXTS = {
    "ascii": "The quick brown fox jumps over the lazy dog. ",
    "cjk": "人工智能正在改变世界,東京は日本の首都です。한국어 문장도 있습니다. ",
    "emoji": "👩‍🔬🚀 ça va? 🇫🇷 naïve café 👍🏽 ",
    "code": "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\n",
}
# Every length once as ASCII; the other alphabets at lengths around each border: 10 + 3 · 5 = 25 prompts.
OTHER_LENGTHS = (PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)


def settings(dtype: str, provider: str = "auto") -> Settings:
    return load_settings(
        None,
        {
            "engine.dtype": dtype,
            "engine.page_size": PAGE,
            "engine.chunk_tokens": CHUNK,
            "engine.max_model_len": CONTEXT,
            "engine.kv_cache_tokens": 16_384,
            "transport.provider": provider,
            "http.port": 0,
        },
    )


@pytest.fixture(scope="module")
def prompts() -> list[GenerationRequest]:
    tokenizer = Tokenizer.from_directory(embedded_model_dir())
    wanted = [("ascii", n) for n in LENGTHS] + [(kind, n) for kind in ("cjk", "emoji", "code") for n in OTHER_LENGTHS]
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    made = []
    for kind, length in wanted:
        # A number in front, so that no prompt is another's prefix.
        tokens = tokenizer.encode(f"{kind} {length}: " + TEXTS[kind] * 200, add_special=False)[:length]
        made.append(GenerationRequest(RequestId(f"{kind}-{length}"), tuple(tokens), sampling))
    assert len(made) >= 24
    return made


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def colocated(request: Any, prompts: list[GenerationRequest]) -> tuple[str, dict[RequestId, tuple[int, ...]]]:
    dtype = request.param
    engine_settings: EngineSettings = settings(dtype).engine
    model = load_model(embedded_model_dir(), dtype)
    with local_engine(model, engine_settings) as engine:
        return dtype, generate(engine, prompts, timeout_s=1_200)


@pytest.fixture(scope="module", params=["tcp", "shm"])
def cluster(request: Any, colocated: tuple[str, Any]) -> Iterator[Cluster]:
    with launch(settings(colocated[0], request.param), http=False) as started:
        yield started


def test_prefill_decode_equals_colocated_and_counts_exactly(
    cluster: Cluster, colocated: tuple[str, dict[RequestId, tuple[int, ...]]], prompts: list[GenerationRequest]
) -> None:
    answers = generate_all(cluster, prompts)
    for prompt in prompts:
        assert tuple(tokens_of(answers[prompt.request_id])) == colocated[1][prompt.request_id], prompt.request_id
        trace = cluster.trace(prompt.request_id)
        if len(prompt.prompt) == 1:
            assert trace is None
            continue
        assert trace is not None and trace.provider == cluster.settings.transport.provider
        assert trace.writes_counted == trace.writes_expected == 30 * pages_sent(len(prompt.prompt) - 1, PAGE)
    eventually(lambda: pools_are_whole(cluster), "all pages are free")


def test_fp32_equals_transformers(
    colocated: tuple[str, dict[RequestId, tuple[int, ...]]], prompts: list[GenerationRequest]
) -> None:
    dtype, answers = colocated
    if dtype != "fp32":
        pytest.skip("transformers rounds bf16 in other places")
    import torch
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(embedded_model_dir(), dtype=torch.float32)
    for prompt in prompts:
        tokens = torch.tensor([prompt.prompt])
        out = reference.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=ANSWER,
            min_new_tokens=ANSWER,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert tuple(out[0, len(prompt.prompt) :].tolist()) == answers[prompt.request_id], prompt.request_id
