"""Multi-head latent attention: a token's cache is one compressed vector, which every head reads in its own way.

Queries are taken into the latents' space and results out of it (absorbed projections), in prefill as in decode: a row's
arithmetic is the same in every role, and keys and values are never made.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.api import LatentShape
from pdserve.models.step import Scratch, Step
from pdserve.ops.api import Floats, Ops, Weights

NORM_EPSILON = (
    1e-6  # of the compressed vectors, whatever rms_norm_eps says (source: transformers, modeling_deepseek_v3)
)


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """`(outputs, inputs)`. Compression is whole on every rank; queries, `expand`, output are of this rank's heads."""

    query_compress: Weights | None  # None: `query` takes the hidden state
    query_norm: Floats | None
    query: Weights
    compress: Weights
    key_rope: Weights
    compress_norm: Floats
    expand: Weights  # (heads, nope + value, rank)
    output: Weights


class LatentAttention:
    """Implements `Attention`. `scale` multiplies the scores."""

    def __init__(self, weights: LatentWeights, shape: LatentShape, scale: float, ops: Ops, scratch: Scratch) -> None:
        self._weights, self._shape, self._scale = weights, shape, scale
        self._ops, self._scratch = ops, scratch

    def append(self, normed: Floats, block: Weights, step: Step) -> None:
        weights, shape, rows = self._weights, self._shape, len(normed)
        if block.ndim != 3 or block.shape[2] != shape.rank + shape.rope:
            raise ValueError(f"the pages hold {block.shape[1:]}, not latents of {shape.rank + shape.rope} elements")
        compressed = self._scratch.rows("compressed", rows, shape.rank)
        key_rope = self._scratch.rows("key_rope", rows, shape.rope)
        self._ops.linear(normed, weights.compress, compressed)
        self._ops.linear(normed, weights.key_rope, key_rope)
        latents = self._scratch.rows("latents", rows, shape.rank + shape.rope)
        self._ops.rms_norm(compressed, weights.compress_norm, NORM_EPSILON, compressed)
        latents[:, : shape.rank] = compressed
        latents[:, shape.rank :] = key_rope
        self._ops.rotate(latents.reshape(rows, 1, shape.rank + shape.rope), step.rotation, step.plan)
        self._ops.append_latent(latents, block, step.plan)

    def attend(self, normed: Floats, block: Weights, step: Step, out: Floats) -> None:
        self.append(normed, block, step)
        weights, shape, rows = self._weights, self._shape, len(normed)
        heads = len(weights.expand)
        queries = self._queries(normed).reshape(rows, heads, shape.nope + shape.rope)
        self._ops.rotate(queries, step.rotation, step.plan)
        width = shape.rank + shape.rope
        absorbed = self._scratch.rows("absorbed", rows * heads, width).reshape(rows, heads, width)
        self._ops.absorb(queries, weights.expand, shape.nope, absorbed)
        attended = self._scratch.rows("attended", rows * heads, shape.rank).reshape(rows, heads, shape.rank)
        self._ops.latent_attention(absorbed, block, step.plan, self._scale, attended)
        values = self._scratch.rows("values", rows, heads * shape.value)
        self._ops.expand(attended, weights.expand, shape.nope, values.reshape(rows, heads, shape.value))
        self._ops.linear(values, weights.output, out)

    def _queries(self, normed: Floats) -> Floats:
        weights, inputs = self._weights, normed
        if weights.query_compress is not None and weights.query_norm is not None:
            inputs = self._scratch.rows("query_compressed", len(normed), len(weights.query_compress))
            self._ops.linear(normed, weights.query_compress, inputs)
            self._ops.rms_norm(inputs, weights.query_norm, NORM_EPSILON, inputs)
        queries = self._scratch.rows("query", len(normed), len(weights.query))
        self._ops.linear(inputs, weights.query, queries)
        return queries
