"""A Hugging Face model directory: its config.json, its tensors, and a digest of both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pdserve.errors import ModelError
from pdserve.models.api import ModelConfig
from pdserve.models.families import Family, expert_shape, family_of, latent_shape
from pdserve.models.rope import rope_settings
from pdserve.models.safetensors_file import TensorEntry, open_tensors

# What else decides the outputs, where a config.json has it.
_FAMILY_SETTINGS = (
    "rope_interleave", "num_experts_per_tok", "norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor",
    "first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step", "qk_nope_head_dim", "v_head_dim",
)  # fmt: skip
_SAMPLES = 16
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a directory holds. `rope` are the rotary settings, which ModelConfig states only in part."""

    path: Path
    config: ModelConfig
    rope: dict[str, Any]
    tensors: dict[str, TensorEntry]


def open_checkpoint(path: Path) -> Checkpoint:
    """Maps a directory's tensors and reads its config. Raises ModelError, which names the path and what is missing."""
    raw = _read_json(path, "config.json")
    architecture, family = family_of(raw, str(path))
    tensors: dict[str, TensorEntry] = {}
    for file in _weight_files(path):
        tensors.update(open_tensors(file))
    fingerprint = _fingerprint(raw, architecture, tensors)
    return Checkpoint(path, _model_config(path, raw, family, fingerprint), rope_settings(raw), tensors)


def _read_json(path: Path, name: str) -> dict[str, Any]:
    file = path / name
    if not path.is_dir():
        raise ModelError(f"{path} is not a directory; a model is a local Hugging Face directory")
    try:
        loaded = json.loads(file.read_text())
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}; expected config.json, *.safetensors there") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return loaded


def _weight_files(path: Path) -> list[Path]:
    single = path / "model.safetensors"
    if single.exists():
        return [single]
    if not (path / "model.safetensors.index.json").exists():
        raise ModelError(f"{path} has neither model.safetensors nor model.safetensors.index.json")
    shards = sorted(set(_read_json(path, "model.safetensors.index.json").get("weight_map", {}).values()))
    for shard in shards:
        if not (path / shard).exists():
            raise ModelError(f"{path}/model.safetensors.index.json names {shard}, which is not there")
    return [path / shard for shard in shards]


def _model_config(path: Path, raw: Mapping[str, Any], family: Family, fingerprint: str) -> ModelConfig:
    try:
        heads = int(raw["num_attention_heads"])
        latent = latent_shape(raw) if family.latents else None
        head_dim = raw.get("head_dim") or family.default_head_dim or int(raw["hidden_size"]) // heads
        return ModelConfig(
            name=path.resolve().name,
            fingerprint=fingerprint,
            layers=int(raw["num_hidden_layers"]),
            hidden=int(raw["hidden_size"]),
            intermediate=int(raw["intermediate_size"]),
            heads=heads,
            kv_heads=None if latent else int(raw.get("num_key_value_heads") or heads),
            head_dim=latent.rank + latent.rope if latent else int(head_dim),
            vocab=int(raw["vocab_size"]),
            context=int(raw.get("max_position_embeddings", 2048)),
            rope_theta=float(rope_settings(raw)["rope_theta"]),
            rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=_eos_token_ids(path, raw),
            head_norms=family.head_norms,
            latent=latent,
            experts=expert_shape(raw, family) if family.experts else None,
        )
    except KeyError as error:
        raise ModelError(f"{path}/config.json lacks {error.args[0]!r}") from error


def _eos_token_ids(path: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json wins, as in transformers: chat models name their end-of-turn token there."""
    found = raw.get("eos_token_id")
    if (path / "generation_config.json").exists():
        found = _read_json(path, "generation_config.json").get("eos_token_id", found)
    if found is None:
        return ()
    return tuple(int(token) for token in (found if isinstance(found, list) else [found]))


def _fingerprint(raw: Mapping[str, Any], architecture: str, tensors: Mapping[str, TensorEntry]) -> str:
    """Digest of what decides the outputs: shape settings, and per tensor name, dtype, shape and sampled bytes.

    Paths and file borders do not enter, so that two hosts with the same weights agree.
    """
    shape = {key: raw.get(key) for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")}
    digest = hashlib.sha256()
    settings: list[Any] = [architecture, shape, raw.get("rms_norm_eps"), rope_settings(raw)]
    family = {key: raw[key] for key in _FAMILY_SETTINGS if raw.get(key) is not None}
    settings += [family] if family else []
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for name in sorted(tensors):
        entry = tensors[name]
        digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
        flat = entry.data.reshape(-1).view(np.uint8)
        for start in np.linspace(0, max(0, flat.size - _SAMPLE_BYTES), _SAMPLES).astype(np.int64):
            digest.update(flat[start : start + _SAMPLE_BYTES].data)
    return digest.hexdigest()[:32]
