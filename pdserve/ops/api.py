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
    """Rotary embedding by position: `cos` and `sin` are `(positions, half)` float32.

    It turns the last `2 * half` elements of a head: i with i + half, or 2i with 2i + 1 where `interleaved`.
    """

    cos: Floats
    sin: Floats
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Routing:
    """How a row's experts follow from the router's logits.

    Softmax or sigmoid gives the scores that weigh; scores plus a bias choose. With `kept_groups < groups`, only experts
    of the groups whose two best choices sum highest can be chosen.
    """

    top_k: int
    sigmoid: bool = False
    groups: int = 1
    kept_groups: int = 1
    normalise: bool = True  # weights of a row sum to `scale`
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Needs:
    """Which operations a model uses beside the common ones."""

    latents: bool = False
    experts: bool = False


COMMON = Needs()


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
        """Rotates x `(rows, heads, head_dim)` in place."""
        ...

    def append(self, keys: Floats, values: Floats, block: Weights, plan: RowPlan) -> None:
        """Writes (rotated) keys and values `(rows, kv_heads, head_dim)` into one layer's pages.

        `block` is `(pages, 2, kv_heads, page_size, head_dim)`, contiguous or a view of the NHD order; bf16 is rounded
        to nearest even.
        """
        ...

    def append_latent(self, latents: Floats, block: Weights, plan: RowPlan) -> None:
        """Writes latents `(rows, rank + rope)` into one layer's pages `(pages, page_size, rank + rope)`."""
        ...

    def attention(self, queries: Floats, block: Weights, plan: RowPlan, out: Floats) -> None:
        """Causal grouped-query attention over one layer's pages, scaled by head_dim ** -0.5.

        queries and out `(rows, heads, head_dim)`. A row at position p reads the keys of positions 0..p, and no other
        memory: what lies behind them in a page may be anything.
        """
        ...

    def latent_attention(self, queries: Floats, block: Weights, plan: RowPlan, scale: float, out: Floats) -> None:
        """Causal attention of all heads over one layer's latents `(pages, page_size, rank + rope)`.

        queries `(rows, heads, rank + rope)`, out `(rows, heads, rank)`: a token's first `rank` elements are its value.
        """
        ...

    def absorb(self, queries: Floats, weight: Weights, nope: int, out: Floats) -> None:
        """Queries `(rows, heads, nope + rope)` in the latents' space: out `(rows, heads, rank + rope)`.

        weight `(heads, nope + value_dim, rank)` made keys and values of latents; its first `nope` rows per head come in
        here. The rope part is copied.
        """
        ...

    def expand(self, latents: Floats, weight: Weights, nope: int, out: Floats) -> None:
        """Attended latents `(rows, heads, rank)` as values: out `(rows, heads, value_dim)`; weight as in `absorb`."""
        ...

    def route(self, logits: Floats, bias: Floats, routing: Routing, experts: Indices, weights: Floats) -> None:
        """Each row's experts, ascending, and their weights, both `(rows, top_k)`; logits `(rows, experts)`.

        bias is `(experts,)`, or empty where the scores alone choose. Of equal choices the first wins.
        """
        ...

    def combine(self, results: Floats, place: Indices, weights: Floats, out: Floats) -> None:
        """`out[r] = sum over k of weights[r, k] * results[place[r, k]]`: results `(places, hidden)`."""
        ...

    def silu_mul(self, gate: Floats, up: Floats) -> None:
        """`gate = silu(gate) * up`, in place, `(rows, intermediate)`."""
        ...
