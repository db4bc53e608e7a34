"""The engine on tiny models of the other families: latents and experts need nothing of their own there."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.config import EngineSettings
from pdserve.engine.local import generate, local_engine
from pdserve.models.load import load_model
from pdserve.types import GenerationRequest, RequestId, SamplingParams
from tests.pdserve.models.passes import prompt_of, reference_of
from tests.pdserve.models.tiny_families import make_tiny

LENGTHS = (1, 8, 33, 70)
SAMPLING = SamplingParams(max_tokens=12, min_tokens=12, temperature=0.0)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek"])
def test_greedy_tokens_equal_transformers_in_company_and_in_chunks(family: str, tmp_path: Path) -> None:
    directory = make_tiny(family, tmp_path / "model", seed=5)
    requests = [
        GenerationRequest(RequestId(f"r{length}"), tuple(prompt_of(length, length)), SAMPLING) for length in LENGTHS
    ]
    expected = {request.request_id: tuple(reference_of(directory, request.prompt, 12)[1]) for request in requests}
    settings = EngineSettings(dtype="fp32", page_size=8, chunk_tokens=16, max_batch=4, kv_cache_tokens=512)
    with local_engine(load_model(directory, "fp32"), settings) as engine:
        assert generate(engine, requests, 60.0) == expected
