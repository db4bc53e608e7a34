"""Rotary position embedding: frequencies as config.json asks for them, and the table by position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.errors import ModelError
from pdserve.ops.api import Rotation

SUPPORTED = ("default", "llama3")


def rope_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings of a config.json, whichever of Hugging Face's two spellings it uses."""
    settings = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    settings.setdefault("rope_theta", raw.get("rope_theta", 10_000.0))
    settings.setdefault("rope_type", settings.get("type", "default"))
    return settings


def inverse_frequencies(settings: Mapping[str, Any], head_dim: int) -> NDArray[np.float32]:
    """`(head_dim // 2,)` float32. Raises ModelError for a scaling that is not supported.

    Source: Hugging Face transformers, `modeling_rope_utils` (llama3: Llama 3.1's published scaling).
    """
    kind = settings["rope_type"]
    if kind not in SUPPORTED:
        raise ModelError(f"rope type {kind!r} is not supported (supported: {', '.join(SUPPORTED)})")
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (1.0 / np.float32(settings["rope_theta"]) ** exponents).astype(np.float32)
    return plain if kind == "default" else _llama3(plain, settings)


def _llama3(plain: NDArray[np.float32], settings: Mapping[str, Any]) -> NDArray[np.float32]:
    try:
        factor, low, high, trained = (
            float(settings[key])
            for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
    except KeyError as error:
        raise ModelError(f"rope type 'llama3' needs {error.args[0]!r} in config.json") from error
    wavelength = 2 * math.pi / plain.astype(np.float64)
    smooth = np.clip((trained / wavelength - low) / (high - low), 0.0, 1.0)
    blended = (1 - smooth) * plain / factor + smooth * plain
    return blended.astype(np.float32)


class RotaryTable:
    """Cosines and sines by position, grown by doubling as longer sequences come."""

    def __init__(self, frequencies: NDArray[np.float32], context: int) -> None:
        self._frequencies = frequencies
        self._context = context
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
        return Rotation(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
