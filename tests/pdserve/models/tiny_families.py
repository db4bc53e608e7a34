"""Tiny random checkpoints of the families beside Llama: Qwen3, Qwen3-MoE, DeepSeek-V3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pdserve.models.safetensors_file import write_tensors
from tests.pdserve.models.tiny import BOS, EOS, VOCAB, RandomWeights, make_tiny_llama, write_byte_tokenizer

COMMON: dict[str, Any] = {
    "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": BOS, "eos_token_id": EOS,
    "torch_dtype": "float32",
}  # fmt: skip
QWEN3 = COMMON | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}  # fmt: skip
DEEPSEEK = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 3,
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24,
    "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 48, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 0.8,
    },
}  # fmt: skip
BASES = {"qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "deepseek": DEEPSEEK}


def make_tiny(family: str, directory: Path, *, seed: int = 0, dtype: str = "fp32", **changes: Any) -> Path:
    """`family` is "llama" or one of BASES; changes are of config.json ("llama": see make_tiny_llama)."""
    if family == "llama":
        return make_tiny_llama(directory, seed=seed, dtype=dtype, **changes)
    directory.mkdir(parents=True, exist_ok=True)
    config = BASES[family] | changes
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    write_tensors(directory / "model.safetensors", _tensors(config, RandomWeights(seed)), dtype)
    write_byte_tokenizer(directory, config["max_position_embeddings"])
    return directory


def _tensors(config: dict[str, Any], random: RandomWeights) -> dict[str, np.ndarray]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors = {
        "model.embed_tokens.weight": random.matrix(vocab, hidden) * 8,
        "model.norm.weight": random.norm(hidden),
        "lm_head.weight": random.matrix(vocab, hidden),
    }
    for index in range(config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)):
        prefix = f"model.layers.{index}."
        tensors[f"{prefix}input_layernorm.weight"] = random.norm(hidden)
        tensors[f"{prefix}post_attention_layernorm.weight"] = random.norm(hidden)
        attention = _latent_attention if "kv_lora_rank" in config else _grouped_attention
        tensors |= {f"{prefix}self_attn.{name}.weight": value for name, value in attention(config, random).items()}
        tensors |= {f"{prefix}mlp.{name}": value for name, value in _feed_forward(config, index, random).items()}
    return tensors


def _grouped_attention(config: dict[str, Any], random: RandomWeights) -> dict[str, np.ndarray]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    query, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        "q_proj": random.matrix(query, hidden), "k_proj": random.matrix(keys, hidden),
        "v_proj": random.matrix(keys, hidden), "o_proj": random.matrix(hidden, query),
        "q_norm": random.norm(dim), "k_norm": random.norm(dim),
    }  # fmt: skip


def _latent_attention(config: dict[str, Any], random: RandomWeights) -> dict[str, np.ndarray]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    narrow = config["q_lora_rank"]
    tensors = {
        "kv_a_proj_with_mqa": random.matrix(rank + rope, hidden), "kv_a_layernorm": random.norm(rank),
        "kv_b_proj": random.matrix(heads * (nope + value), rank), "o_proj": random.matrix(hidden, heads * value),
    }  # fmt: skip
    if narrow is None:
        return tensors | {"q_proj": random.matrix(heads * (nope + rope), hidden)}
    return tensors | {
        "q_a_proj": random.matrix(narrow, hidden), "q_a_layernorm": random.norm(narrow),
        "q_b_proj": random.matrix(heads * (nope + rope), narrow),
    }  # fmt: skip


def _feed_forward(config: dict[str, Any], index: int, random: RandomWeights) -> dict[str, np.ndarray]:
    hidden, latents = config["hidden_size"], "kv_lora_rank" in config
    count = config.get("n_routed_experts" if latents else "num_experts", 0)
    dense = index < config["first_k_dense_replace"] if latents else _is_dense_qwen(config, index)
    if not count or dense:
        return _gated("", hidden, config["intermediate_size"], random)
    tensors = {"gate.weight": random.matrix(count, hidden)}
    if latents:
        tensors["gate.e_score_correction_bias"] = (random.norm(count) - 1) * 2
        wide = config["n_shared_experts"] * config["moe_intermediate_size"]
        tensors |= _gated("shared_experts.", hidden, wide, random)
    for expert in range(count):
        tensors |= _gated(f"experts.{expert}.", hidden, config["moe_intermediate_size"], random)
    return tensors


def _is_dense_qwen(config: dict[str, Any], index: int) -> bool:
    return index in config.get("mlp_only_layers", ()) or (index + 1) % config.get("decoder_sparse_step", 1) != 0


def _gated(prefix: str, hidden: int, wide: int, random: RandomWeights) -> dict[str, np.ndarray]:
    return {
        f"{prefix}gate_proj.weight": random.matrix(wide, hidden),
        f"{prefix}up_proj.weight": random.matrix(wide, hidden),
        f"{prefix}down_proj.weight": random.matrix(hidden, wide),
    }
