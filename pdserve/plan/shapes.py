"""What a transfer plan must know of a model: its layer groups, and how large a token's entry is in each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.config import EMBEDDED_MODEL
from pdserve.errors import ConfigError
from policies.sharding import LayerGroup


@dataclass(frozen=True, slots=True)
class CacheShape:
    """`head_dim` of a latent cache includes its rope part; `drafter_layers` have the same geometry."""

    name: str
    layers: int
    kv_heads: int | None
    head_dim: int
    drafter_layers: int = 0

    @property
    def target(self) -> LayerGroup:
        return LayerGroup(self.layers, self.kv_heads)

    @property
    def drafter(self) -> LayerGroup:
        return LayerGroup(self.drafter_layers, self.kv_heads)


BUILT_IN = {
    shape.name: shape
    for shape in (
        CacheShape("qwen3-coder-480b", layers=62, kv_heads=8, head_dim=128),
        CacheShape("deepseek-r1", layers=61, kv_heads=None, head_dim=512 + 64, drafter_layers=1),
        CacheShape("qwen3-235b", layers=94, kv_heads=4, head_dim=128),
        CacheShape(EMBEDDED_MODEL, layers=30, kv_heads=3, head_dim=64),
    )
}


def cache_shape(name_or_path: str) -> CacheShape:
    """A built-in shape, or a model directory's; its weights are not read. Raises ConfigError."""
    if name_or_path in BUILT_IN:
        return BUILT_IN[name_or_path]
    directory = Path(name_or_path).expanduser()
    if not directory.is_dir():
        raise ConfigError(
            f"--model: no shape and no directory {name_or_path!r}; allowed: {', '.join(BUILT_IN)}, "
            "or a local Hugging Face directory"
        )
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"--model: cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--model: {file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model: {file} must hold a JSON object")
    return _from_config(file, config)


def _from_config(file: Path, config: Mapping[str, Any]) -> CacheShape:
    """Names follow Hugging Face's config.json; `kv_lora_rank` marks a latent cache."""
    name, layers = file.resolve().parent.name, _number(file, config, "num_hidden_layers")
    drafter = (
        _number(file, config, "num_nextn_predict_layers", least=0) if config.get("num_nextn_predict_layers") else 0
    )
    if config.get("kv_lora_rank") is not None:
        latent = _number(file, config, "kv_lora_rank") + _number(file, config, "qk_rope_head_dim")
        return CacheShape(name, layers, None, latent, drafter)
    heads = _number(file, config, "num_attention_heads")
    kv_heads = heads if config.get("num_key_value_heads") is None else _number(file, config, "num_key_value_heads")
    if config.get("head_dim") is not None:
        return CacheShape(name, layers, kv_heads, _number(file, config, "head_dim"), drafter)
    hidden = _number(file, config, "hidden_size")
    if hidden < heads:
        raise ConfigError(f"--model: {file}: hidden_size ({hidden}) is less than num_attention_heads ({heads})")
    return CacheShape(name, layers, kv_heads, hidden // heads, drafter)


def _number(file: Path, config: Mapping[str, Any], key: str, least: int = 1) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        found = "lacks it" if key not in config else f"has {value!r}"
        raise ConfigError(f"--model: {key} must be a whole number, at least {least}; {file} {found}")
    return value
