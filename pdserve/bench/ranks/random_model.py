"""A random checkpoint of a size to choose: what a step costs does not depend on what the weights say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.models.safetensors_file import write_tensors

HEAD_DIM = 64
SMALLEST = 4 * HEAD_DIM
"""Four query heads on two KV heads: what two ranks can share."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-like decoder: two query heads on a KV head, an MLP three times as wide as the model."""

    layers: int = 8
    hidden: int = 512
    vocab: int = 8192
    context: int = 4096

    def config(self) -> dict[str, Any]:
        heads = self.hidden // HEAD_DIM
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "hidden_size": self.hidden, "intermediate_size": 3 * self.hidden, "num_hidden_layers": self.layers,
            "num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": HEAD_DIM,
            "vocab_size": self.vocab, "max_position_embeddings": self.context, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        }  # fmt: skip


def write_random(directory: Path, shape: Shape, dtype: str) -> Path:
    """config.json and model.safetensors, without a tokenizer; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape.config() | {"torch_dtype": dtype}))
    write_tensors(directory / "model.safetensors", _tensors(shape), dtype)
    return directory


def _tensors(shape: Shape) -> dict[str, NDArray[Any]]:
    random, hidden, wide = np.random.default_rng(0), shape.hidden, 3 * shape.hidden

    def matrix(rows: int, columns: int) -> NDArray[Any]:
        return random.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)

    ones = np.ones(hidden, np.float32)
    tensors = {
        "model.embed_tokens.weight": matrix(shape.vocab, hidden),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(shape.vocab, hidden),
    }
    for index in range(shape.layers):
        prefix = f"model.layers.{index}."
        tensors |= {f"{prefix}input_layernorm.weight": ones, f"{prefix}post_attention_layernorm.weight": ones}
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden), ("self_attn.k_proj", hidden // 2, hidden),
            ("self_attn.v_proj", hidden // 2, hidden), ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", wide, hidden), ("mlp.up_proj", wide, hidden), ("mlp.down_proj", hidden, wide),
        ):  # fmt: skip
            tensors[f"{prefix}{name}.weight"] = matrix(rows, columns)
    return tensors
