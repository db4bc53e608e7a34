"""Grouped-query attention with rotary embedding, and with norms of queries and keys where a family has them."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.step import Scratch, Step
from pdserve.ops.api import Floats, Ops, Weights


@dataclass(frozen=True, slots=True)
class GroupedWeights:
    """This rank's heads: `(outputs, inputs)`, float32 or bf16 as uint16; norms are float32."""

    query: Weights
    key: Weights
    value: Weights
    output: Weights
    query_norm: Floats | None = None
    key_norm: Floats | None = None


class GroupedAttention:
    """Implements `Attention`."""

    def __init__(self, weights: GroupedWeights, head_dim: int, epsilon: float, ops: Ops, scratch: Scratch) -> None:
        self._weights, self._head_dim, self._epsilon = weights, head_dim, epsilon
        self._ops, self._scratch = ops, scratch

    def append(self, normed: Floats, block: Weights, step: Step) -> None:
        weights = self._weights
        keys = self._heads("key", normed, weights.key, weights.key_norm)
        values = self._heads("value", normed, weights.value, None)
        if block.shape[2] != keys.shape[1]:
            raise ValueError(f"the pages hold {block.shape[2]} KV heads, this rank's model has {keys.shape[1]}")
        self._ops.rotate(keys, step.rotation, step.plan)
        self._ops.append(keys, values, block, step.plan)

    def attend(self, normed: Floats, block: Weights, step: Step, out: Floats) -> None:
        self.append(normed, block, step)
        queries = self._heads("query", normed, self._weights.query, self._weights.query_norm)
        self._ops.rotate(queries, step.rotation, step.plan)
        rows, heads, dim = queries.shape
        attended = self._scratch.rows("attended", rows, heads * dim)
        self._ops.attention(queries, block, step.plan, attended.reshape(queries.shape))
        self._ops.linear(attended, self._weights.output, out)

    def _heads(self, name: str, normed: Floats, weight: Weights, norm: Floats | None) -> Floats:
        """`(rows, heads, head_dim)`."""
        projected = self._scratch.rows(name, len(normed), len(weight))
        self._ops.linear(normed, weight, projected)
        if norm is not None:
            each = projected.reshape(-1, self._head_dim)
            self._ops.rms_norm(each, norm, self._epsilon, each)
        return projected.reshape(len(normed), len(weight) // self._head_dim, self._head_dim)
