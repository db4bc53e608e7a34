"""Rotary position embedding: frequencies as config.json asks for them, and the table by position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.errors import ModelError
from pdserve.ops.api import Rotation

SUPPORTED = ("default", "llama3", "yarn")


def rope_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings of a config.json, whichever of Hugging Face's two spellings it uses."""
    settings = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    settings.setdefault("rope_theta", raw.get("rope_theta", 10_000.0))
    settings.setdefault("rope_type", settings.get("type", "default"))
    return settings


def inverse_frequencies(settings: Mapping[str, Any], head_dim: int) -> NDArray[np.float32]:
    """`(head_dim // 2,)` float32. Raises ModelError for a scaling that is not supported.

    Source: Hugging Face transformers, `modeling_rope_utils` (llama3: Llama 3.1's published scaling; yarn: Peng et al.,
    "YaRN", section 3.2).
    """
    kind = settings["rope_type"]
    if kind not in SUPPORTED:
        raise ModelError(f"rope type {kind!r} is not supported (supported: {', '.join(SUPPORTED)})")
    if settings.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelError(f"partial_rotary_factor {settings['partial_rotary_factor']} is not supported")
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (1.0 / np.float32(settings["rope_theta"]) ** exponents).astype(np.float32)
    if kind == "yarn":
        return _yarn(plain, settings, head_dim)
    return plain if kind == "default" else _llama3(plain, settings)


def _llama3(plain: NDArray[np.float32], settings: Mapping[str, Any]) -> NDArray[np.float32]:
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, trained = (_number(settings, key) for key in keys)
    wavelength = 2 * math.pi / plain.astype(np.float64)
    smooth = np.clip((trained / wavelength - low) / (high - low), 0.0, 1.0)
    blended = (1 - smooth) * plain / factor + smooth * plain
    return blended.astype(np.float32)


def _yarn(plain: NDArray[np.float32], settings: Mapping[str, Any], head_dim: int) -> NDArray[np.float32]:
    """Long wavelengths are stretched by `factor`, short ones stay, between them a ramp over the dimensions."""
    factor, trained = _number(settings, "factor"), _number(settings, "original_max_position_embeddings")
    base = float(settings["rope_theta"])

    def dimension(rotations: float) -> float:
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(settings.get("beta_fast") or 32), dimension(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((steps - low) / (high - low if high != low else 0.001), 0, 1).astype(np.float32)
    blended: NDArray[np.float32] = plain / np.float32(factor) * ramp + plain * (1 - ramp)
    return blended


def _number(settings: Mapping[str, Any], key: str) -> float:
    if settings.get(key) is None:
        raise ModelError(f"rope type {settings['rope_type']!r} needs {key!r} in config.json")
    return float(settings[key])


def rotary_scale(settings: Mapping[str, Any]) -> float:
    """What cosines and sines are multiplied by; 1 but for yarn."""
    if settings["rope_type"] != "yarn":
        return 1.0
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    factor, scale, whole = _number(settings, "factor"), settings.get("mscale"), settings.get("mscale_all_dim")
    return _magnitude(factor, scale) / _magnitude(factor, whole) if scale and whole else _magnitude(factor, 1.0)


def softmax_scale(settings: Mapping[str, Any], query_dim: int) -> float:
    """Of latent attention: `query_dim ** -0.5`, which yarn raises by `mscale_all_dim`.

    Source: Hugging Face transformers, `modeling_deepseek_v3`.
    """
    whole = settings.get("mscale_all_dim")
    raised = (
        _magnitude(_number(settings, "factor"), whole) ** 2 if whole and settings["rope_type"] != "default" else 1.0
    )
    return float(query_dim**-0.5 * raised)


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


class RotaryTable:
    """Cosines and sines by position, grown by doubling as longer sequences come."""

    def __init__(
        self, frequencies: NDArray[np.float32], context: int, *, scale: float = 1.0, interleaved: bool = False
    ) -> None:
        self._frequencies = frequencies
        self._context = context
        self._scale = np.float32(scale)
        self._interleaved = interleaved
        self._rotation = self._compute(min(context, 4096))

    def up_to(self, positions: int) -> Rotation:
        """A table that covers positions `0..positions - 1`."""
        held = len(self._rotation.cos)
        if positions > held:
            self._rotation = self._compute(max(positions, min(2 * held, self._context)))
        return self._rotation

    def _compute(self, positions: int) -> Rotation:
        # The product in float32 as transformers has it; sine and cosine in float64, so that every table agrees.
        angles = np.outer(np.arange(positions, dtype=np.float32), self._frequencies).astype(np.float64)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        if self._scale != 1:
            cos, sin = cos * self._scale, sin * self._scale
        return Rotation(cos, sin, self._interleaved)
