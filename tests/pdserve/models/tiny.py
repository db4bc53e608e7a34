"""Tiny random checkpoints of every family: a whole stack can be served from one in milliseconds."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pdserve.models.safetensors_file import write_tensors

VOCAB = 300
BOS, EOS = 256, 257
SPECIAL = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tiny_llama(
    directory: Path,
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 64,
    intermediate: int = 96,
    vocab: int = VOCAB,
    context: int = 512,
    dtype: str = "fp32",
    tied: bool = False,
    seed: int = 0,
    rope_scaling: dict[str, Any] | None = None,
    tokenizer: bool = True,
) -> Path:
    """Writes config.json, model.safetensors and a byte-level tokenizer with a chat template; returns the directory.

    Untied by default: under greedy decoding, tied random weights repeat one token for ever.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab,
        "max_position_embeddings": context, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": tied, "bos_token_id": BOS, "eos_token_id": EOS, "torch_dtype": "float32",
    }  # fmt: skip
    if rope_scaling is not None:
        config["rope_scaling"] = rope_scaling
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    write_tensors(directory / "model.safetensors", _tensors(config, seed), dtype)
    if tokenizer:
        write_byte_tokenizer(directory, context)
    return directory


class RandomWeights:
    """Weights under which tokens differ: nothing vanishes, no norm is one."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def matrix(self, rows: int, columns: int) -> np.ndarray:
        return (self._random.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns)).astype(np.float32)

    def norm(self, size: int) -> np.ndarray:
        return (1 + 0.1 * self._random.standard_normal(size)).astype(np.float32)


def _tensors(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    values = RandomWeights(seed)
    matrix, norm = values.matrix, partial(values.norm, hidden)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden) * 8, "model.norm.weight": norm()}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        tensors |= {
            f"{prefix}input_layernorm.weight": norm(),
            f"{prefix}post_attention_layernorm.weight": norm(),
            f"{prefix}self_attn.q_proj.weight": matrix(query, hidden),
            f"{prefix}self_attn.k_proj.weight": matrix(keys, hidden),
            f"{prefix}self_attn.v_proj.weight": matrix(keys, hidden),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, query),
            f"{prefix}mlp.gate_proj.weight": matrix(wide, hidden),
            f"{prefix}mlp.up_proj.weight": matrix(wide, hidden),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, wide),
        }
    return tensors


def write_byte_tokenizer(directory: Path, context: int = 512) -> None:
    """Token ids 0..255 are bytes, the special tokens follow from 256 on."""
    alphabet = _byte_alphabet()
    vocab = {alphabet[byte]: byte for byte in range(256)} | {name: 256 + i for i, name in enumerate(SPECIAL)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[1],
        "model_max_length": context, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _byte_alphabet() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte (source: GPT-2's `bytes_to_unicode`)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
