"""The Llama forward pass against transformers, and against itself in other chunks and batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pdserve.models.load import load_model
from pdserve.ops.torch_ops import TorchOps
from tests.pdserve.models.passes import PAGE, cache_for, forward, greedy, prompt_of, reference_of
from tests.pdserve.models.tiny import VOCAB, make_tiny_llama

VARIANTS = {
    "grouped": {},
    "one kv head": {"kv_heads": 1},
    "as many kv heads": {"kv_heads": 4, "head_dim": 32},
    "tied": {"tied": True},
    "odd widths": {"hidden": 72, "intermediate": 100, "layers": 3},
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_tokens_agree_with_transformers(name: str, tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "model", seed=3, **VARIANTS[name])  # type: ignore[arg-type]
    model, tokens = load_model(directory, "fp32"), prompt_of(90)
    expected, continued = reference_of(directory, tokens, 16)
    with cache_for(model, "fp32") as cache:
        logits = forward(model, cache, [(tokens, 0, 0)])
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
        assert greedy(model, cache, logits[-1], 90, 16) == continued


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_chunks_batches_and_roles_do_not_change_a_bit(tiny: Path, dtype: str) -> None:
    model = load_model(tiny, dtype)  # type: ignore[arg-type]
    tokens, others = prompt_of(100), prompt_of(61, seed=1)
    with cache_for(model, dtype) as cache:
        whole = forward(model, cache, [(tokens, 0, 0)])
        pages = cache.blocks[:, 3:16].copy()
        chunked = [forward(model, cache, [(tokens[start : start + 24], start, 16)]) for start in range(0, 100, 24)]
        assert np.array_equal(np.concatenate(chunked), whole)
        # positions 0..95 are twelve whole pages, from the end of the run of 16 downwards
        assert np.array_equal(cache.blocks[:, 20:32], pages[:, 1:13])
        # the same prompt decoded row by row, beside a prefill of another one
        forward(model, cache, [(tokens[:90], 0, 32)], logits=[])
        for position in range(90, 100):
            mixed = forward(model, cache, [(others[:17], 0, 48), ([tokens[position]], position, 32)], logits=[17])
            assert np.array_equal(mixed[0], whole[position])


def test_without_logits_the_pages_are_the_same(tiny: Path) -> None:
    model, tokens = load_model(tiny, "fp32"), prompt_of(40)
    with cache_for(model, "fp32") as cache:
        forward(model, cache, [(tokens, 0, 0)])
        with_logits = cache.blocks[:, 11:16].copy()
        assert forward(model, cache, [(tokens, 0, 16)], logits=[]).shape == (0, VOCAB)
        assert np.array_equal(cache.blocks[:, 27:32], with_logits)


def test_chosen_rows_get_their_own_logits(tiny: Path) -> None:
    model, tokens = load_model(tiny, "fp32"), prompt_of(30)
    with cache_for(model, "fp32") as cache:
        every = forward(model, cache, [(tokens, 0, 0)])
        assert np.array_equal(forward(model, cache, [(tokens, 0, 0)], logits=[29, 0, 7]), every[[29, 0, 7]])


def test_torch_ops_agree_with_the_kernels(tiny: Path) -> None:
    tokens = prompt_of(50)
    results = []
    for ops in (None, TorchOps()):
        model = load_model(tiny, "bf16", ops=ops)
        with cache_for(model, "bf16") as cache:
            results.append(forward(model, cache, [(tokens, 0, 0)]))
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=0.03 * np.abs(results[0]).max())


def test_a_position_behind_the_page_table_is_refused(tiny: Path) -> None:
    model = load_model(tiny, "fp32")
    with cache_for(model, "fp32") as cache, pytest.raises(ValueError, match="position 128 lies behind"):
        forward(model, cache, [([1], 16 * PAGE, 0)])
