"""The few operations that a transformer's forward pass is made of, as a seam between models and kernels.

Two implementations: `NumbaOps` (every row's arithmetic is the same whatever else is in the call: the determinism
contract) and `TorchOps` (oracle of the tests, fallback, and the faster path where a CPU multiplies bf16 natively).

Arrays are C-contiguous. Activations are float32. Weights and key/value blocks are float32, or bf16 seen as uint16.
Outputs are written into arrays of the caller; nothing is returned and nothing is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]
Weights = NDArray[Any]  # float32, or bf16 seen as uint16


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Where the rows of a ragged batch stand: per sequence for reading keys, per row for writing them."""

    row_start: Indices  # (sequences + 1,)
    first_position: Indices  # (sequences,)
    page_table: Indices  # (sequences, max_pages)
    position: Indices  # (rows,) position in its sequence
    page: Indices  # (rows,) page that holds this row's key and value
    slot: Indices  # (rows,) token slot inside that page


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding by position: `cos` and `sin` are `(positions, head_dim // 2)` float32."""

    cos: Floats
    sin: Floats


class Ops(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def deterministic(self) -> bool:
        """Whether a row's result is bitwise the same alone, in any batch, in any chunking and in every role."""
        ...

    def embed(self, table: Weights, tokens: Indices, out: Floats) -> None:
        """`out[r] = table[tokens[r]]`: table `(vocab, hidden)`, out `(rows, hidden)`."""
        ...

    def linear(self, x: Floats, weight: Weights, out: Floats) -> None:
        """`out = x · weightᵀ`: x `(rows, inputs)`, weight `(outputs, inputs)`, out `(rows, outputs)`."""
        ...

    def rms_norm(self, x: Floats, weight: Floats, epsilon: float, out: Floats) -> None:
        """Each row of x `(rows, hidden)` over its root mean square, times weight `(hidden,)`."""
        ...

    def add_rms_norm(self, residual: Floats, delta: Floats, weight: Floats, epsilon: float, out: Floats) -> None:
        """`residual += delta`, then `rms_norm(residual)` into out."""
        ...

    def rotate(self, x: Floats, rotation: Rotation, plan: RowPlan) -> None:
        """Rotates x `(rows, heads, head_dim)` in place, halves paired as Hugging Face does."""
        ...

    def append(self, keys: Floats, values: Floats, block: Weights, plan: RowPlan) -> None:
        """Writes (rotated) keys and values `(rows, kv_heads, head_dim)` into one layer's pages.

        `block` is `(pages, 2, kv_heads, page_size, head_dim)`; bf16 is rounded to nearest even.
        """
        ...

    def attention(self, queries: Floats, block: Weights, plan: RowPlan, out: Floats) -> None:
        """Causal grouped-query attention over one layer's pages, scaled by head_dim ** -0.5.

        queries and out `(rows, heads, head_dim)`. A row at position p reads the keys of positions 0..p, and no other
        memory: what lies behind them in a page may be anything.
        """
        ...

    def silu_mul(self, gate: Floats, up: Floats) -> None:
        """`gate = silu(gate) * up`, in place, `(rows, intermediate)`."""
        ...
