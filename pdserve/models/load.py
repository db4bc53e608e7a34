"""From a model's name or directory to a model: weights mapped, never copied per process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pdserve.config import EMBEDDED_MODEL
from pdserve.errors import ModelError
from pdserve.models.api import ModelConfig
from pdserve.models.checkpoint import Checkpoint, open_checkpoint
from pdserve.models.embedded import embedded_model_dir
from pdserve.models.files import file_lock
from pdserve.models.llama import LayerWeights, LlamaModel, LlamaWeights
from pdserve.models.rope import RotaryTable, inverse_frequencies
from pdserve.models.safetensors_file import convert, open_tensors, write_tensors
from pdserve.ops.api import Ops
from pdserve.ops.choice import choose_ops
from pdserve.paths import cache_dir

Dtype = Literal["bf16", "fp32"]
Progress = Callable[[str], None]

_log = logging.getLogger(__name__)
_STORED = {"bf16": "BF16", "fp32": "F32"}
_LAYER_TENSORS = {
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj", "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def model_dir(path_or_name: str | Path, progress: Progress | None = None) -> Path:
    """The directory of a model; the embedded one is made on first use (about 10 seconds)."""
    if str(path_or_name) == EMBEDDED_MODEL:
        return embedded_model_dir(progress)
    return Path(path_or_name)


def read_config(path_or_name: str | Path, progress: Progress | None = None) -> ModelConfig:
    """Shape and fingerprint of a model, without preparing its weights. Raises ModelError."""
    return open_checkpoint(model_dir(path_or_name, progress)).config


def load_model(
    path_or_name: str | Path,
    dtype: Dtype,
    *,
    deterministic: bool = True,
    ops: Ops | None = None,
    progress: Progress | None = None,
) -> LlamaModel:
    """Loads a local Hugging Face directory or the embedded model.

    Where the files are not in `dtype`, they are converted once into the cache directory. `progress` gets a line for
    whatever may take more than a second (conversion, kernel compilation). Raises ModelError.
    """
    report = progress or _log.info
    checkpoint = open_checkpoint(model_dir(path_or_name, report))
    tensors = _tensors_in(checkpoint, dtype, report)
    config = checkpoint.config
    rotary = RotaryTable(inverse_frequencies(checkpoint.rope, config.head_dim), config.context)
    weights = _llama_weights(checkpoint, tensors)
    return LlamaModel(config, weights, rotary, ops or choose_ops(dtype, deterministic, config.head_dim, report))


def _tensors_in(checkpoint: Checkpoint, dtype: Dtype, report: Progress) -> dict[str, NDArray[Any]]:
    """The checkpoint's tensors as `dtype`, mapped from its own files or from a converted copy in the cache."""
    if all(entry.dtype == _STORED[dtype] for entry in checkpoint.tensors.values()):
        return {name: entry.data for name, entry in checkpoint.tensors.items()}
    config = checkpoint.config
    copy = cache_dir() / "models" / "converted" / f"{config.name}-{config.fingerprint[:16]}-{dtype}.safetensors"
    if not copy.exists():
        with file_lock(copy):
            if not copy.exists():
                report(f"converting {config.name} to {dtype} (once, into {copy.parent})")
                write_tensors(copy, {name: entry.data for name, entry in checkpoint.tensors.items()}, dtype)
    return {name: entry.data for name, entry in open_tensors(copy).items()}


def _llama_weights(checkpoint: Checkpoint, tensors: Mapping[str, NDArray[Any]]) -> LlamaWeights:
    config = checkpoint.config

    def matrix(name: str, rows: int, columns: int) -> NDArray[Any]:
        return _checked(checkpoint, tensors, name, (rows, columns))

    def norm(name: str) -> NDArray[np.float32]:
        return np.array(convert(_checked(checkpoint, tensors, name, (config.hidden,)), "fp32"), np.float32)

    query, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {
        "query": (query, config.hidden), "key": (keys, config.hidden), "value": (keys, config.hidden),
        "output": (config.hidden, query), "gate": (config.intermediate, config.hidden),
        "up": (config.intermediate, config.hidden), "down": (config.hidden, config.intermediate),
    }  # fmt: skip

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        matrices = {field: matrix(f"{prefix}{name}.weight", *shapes[field]) for field, name in _LAYER_TENSORS.items()}
        return LayerWeights(
            attention_norm=norm(f"{prefix}input_layernorm.weight"),
            mlp_norm=norm(f"{prefix}post_attention_layernorm.weight"),
            **matrices,
        )

    embedding = matrix("model.embed_tokens.weight", config.vocab, config.hidden)
    head = embedding if config.tied_embeddings else matrix("lm_head.weight", config.vocab, config.hidden)
    layers = tuple(layer(index) for index in range(config.layers))
    return LlamaWeights(embedding, layers, norm("model.norm.weight"), head)


def _checked(
    checkpoint: Checkpoint, tensors: Mapping[str, NDArray[Any]], name: str, shape: tuple[int, ...]
) -> NDArray[Any]:
    found = tensors.get(name)
    if found is None:
        raise ModelError(f"{checkpoint.path}: no tensor {name!r} in its safetensors files")
    if found.shape != shape:
        raise ModelError(f"{checkpoint.path}: tensor {name} is {found.shape}, config.json asks for {shape}")
    return found
