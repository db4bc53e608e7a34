"""Every family against transformers, and against itself in other chunks, batches, pages and orders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.errors import ModelError
from pdserve.models.load import load_model, read_config
from pdserve.ops.torch_ops import TorchOps
from policies.layout import KvLayout
from tests.pdserve.models.passes import cache_for, forward, greedy, prompt_of, reference_of
from tests.pdserve.models.tiny_families import DEEPSEEK, make_tiny

PLAIN_ROPE = {"rope_scaling": None}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3 yarn": ("qwen3", {"rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe sparse steps": ("qwen3_moe", {
        "decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": False, "num_experts": 5}),
    "deepseek": ("deepseek", {}),
    "deepseek plain": ("deepseek", PLAIN_ROPE | {
        "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "rope_interleave": False,
        "norm_topk_prob": False}),
    "deepseek dense": ("deepseek", PLAIN_ROPE | {"first_k_dense_replace": 3}),
}  # fmt: skip
FAMILIES = ("qwen3", "qwen3_moe", "deepseek")


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_tokens_agree_with_transformers(name: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[name]
    directory, tokens = make_tiny(family, tmp_path / "model", seed=3, **changes), prompt_of(90)
    expected, continued = reference_of(directory, tokens, 16)
    model = load_model(directory, "fp32")
    for page_size, chunk in ((8, 90), (16, 32), (64, 64)):
        with cache_for(model, "fp32", page_size) as cache:
            parts = [(tokens[start : start + chunk], start, 0) for start in range(0, 90, chunk)]
            logits = np.concatenate([forward(model, cache, [part]) for part in parts])
            np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
            assert greedy(model, cache, logits[-1], 90, 16) == continued


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_batches_and_roles_do_not_change_a_bit(family: str, dtype: str, tmp_path: Path) -> None:
    model = load_model(make_tiny(family, tmp_path / "model", dtype=dtype), dtype)  # type: ignore[arg-type]
    tokens, others = prompt_of(60), prompt_of(31, seed=1)
    with cache_for(model, dtype) as cache:
        whole = forward(model, cache, [(tokens, 0, 0)])
        pages = cache.blocks[:, 9:16].copy()
        chunked = [forward(model, cache, [(tokens[start : start + 24], start, 16)]) for start in range(0, 60, 24)]
        assert np.array_equal(np.concatenate(chunked), whole)
        assert np.array_equal(cache.blocks[:, 25:32], pages)
        forward(model, cache, [(tokens[:55], 0, 32)], logits=[])
        for position in range(55, 60):
            mixed = forward(model, cache, [(others[:17], 0, 48), ([tokens[position]], position, 32)], logits=[17])
            assert np.array_equal(mixed[0], whole[position])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_order_inside_a_block_does_not_change_a_bit(dtype: str, tmp_path: Path) -> None:
    model, tokens = load_model(make_tiny("qwen3", tmp_path / "model", dtype=dtype), dtype), prompt_of(40)  # type: ignore[arg-type]
    with cache_for(model, dtype) as heads_first, cache_for(model, dtype, layout=KvLayout.NHD) as tokens_first:
        assert np.array_equal(
            forward(model, heads_first, [(tokens, 0, 0)]), forward(model, tokens_first, [(tokens, 0, 0)])
        )
        assert tokens_first.blocks.shape[-4:] == (2, 8, 2, 32)
        held = tokens_first.blocks[:, 11:16].swapaxes(3, 4)
        assert np.array_equal(held, heads_first.blocks[:, 11:16])


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_ops_agree_with_the_kernels(family: str, tmp_path: Path) -> None:
    directory, tokens = make_tiny(family, tmp_path / "model"), prompt_of(50)
    results = []
    for ops in (None, TorchOps()):
        model = load_model(directory, "fp32", ops=ops)
        with cache_for(model, "fp32") as cache:
            results.append(forward(model, cache, [(tokens, 0, 0)]))
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=1e-4 * np.abs(results[0]).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_batch_passes_all_layers(family: str, tmp_path: Path) -> None:
    model = load_model(make_tiny(family, tmp_path / "model"), "fp32")
    with cache_for(model, "fp32") as cache:
        assert forward(model, cache, []).shape == (0, model.config.vocab)


def test_the_layers_behind_the_last_are_kept_but_not_run(tmp_path: Path) -> None:
    plain = load_model(make_tiny("deepseek", tmp_path / "plain"), "fp32")
    model = load_model(make_tiny("deepseek", tmp_path / "model", num_nextn_predict_layers=1), "fp32")
    assert not plain.ends.drafter and model.config.layers == 3
    assert "model.layers.3.self_attn.kv_b_proj.weight" in model.ends.drafter
    assert all(name.startswith("model.layers.3.") for name in model.ends.drafter)
    with cache_for(model, "fp32") as cache, cache_for(plain, "fp32") as other:
        tokens = prompt_of(10)
        np.testing.assert_array_equal(forward(model, cache, [(tokens, 0, 0)]), forward(plain, other, [(tokens, 0, 0)]))


def test_a_latent_cache_has_no_heads(tmp_path: Path) -> None:
    config = read_config(make_tiny("deepseek", tmp_path / "model"))
    assert (config.kv_heads, config.head_dim) == (None, 48)
    config = read_config(make_tiny("qwen3_moe", tmp_path / "moe"))
    assert config.experts is not None and config.experts.layers == frozenset({0, 2})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 24}, "kv_lora_rank 24 is not a multiple of 16"),
        ({"n_group": 3}, "8 experts cannot form 3 groups"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 does not fit: a token can choose among 4"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"n_routed_experts": 9, "n_group": 1, "topk_group": 1}, "config.json asks for"),
    ],
)
def test_what_a_family_cannot_do_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = make_tiny("deepseek", tmp_path / "model")
    (directory / "config.json").write_text(json.dumps(DEEPSEEK | changes))
    with pytest.raises(ModelError, match=message):
        load_model(directory, "fp32")
