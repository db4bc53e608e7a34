"""The Llama architecture over a ragged batch and a paged cache: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.attention.batch import RaggedBatch
from pdserve.kv.memory import KvMemory
from pdserve.models.api import ModelConfig
from pdserve.models.rope import RotaryTable
from pdserve.ops.api import Floats, Ops, RowPlan, Weights


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights `(outputs, inputs)`, float32 or bf16 as uint16; norms are float32."""

    attention_norm: Floats
    query: Weights
    key: Weights
    value: Weights
    output: Weights
    mlp_norm: Floats
    gate: Weights
    up: Weights
    down: Weights


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    embedding: Weights
    layers: tuple[LayerWeights, ...]
    norm: Floats
    head: Weights  # the embedding itself where they are tied


class WorkBuffers:
    """Activations of one forward pass, kept between passes and grown when a batch has more rows."""

    def __init__(self, config: ModelConfig) -> None:
        self._widths = {
            "residual": config.hidden,
            "normed": config.hidden,
            "delta": config.hidden,
            "query": config.heads * config.head_dim,
            "key": config.kv_heads * config.head_dim,
            "value": config.kv_heads * config.head_dim,
            "attended": config.heads * config.head_dim,
            "gate": config.intermediate,
            "up": config.intermediate,
        }
        self._held: dict[str, Floats] = {}
        self._rows = 0

    def reserve(self, rows: int) -> None:
        if rows > self._rows:
            self._held = {name: np.empty((rows, width), np.float32) for name, width in self._widths.items()}
            self._rows = rows

    def rows(self, name: str, rows: int) -> Floats:
        return self._held[name][:rows]


class LlamaModel:
    """Implements `Model`. One thread at a time may call `forward`: the work buffers are its own."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights, rotary: RotaryTable, ops: Ops) -> None:
        self.config = config
        self.ops = ops
        self._weights = weights
        self._rotary = rotary
        self._buffers = WorkBuffers(config)

    def forward(self, batch: RaggedBatch, cache: KvMemory, layer_counter: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Model.forward`. Rows are independent: in deterministic ops no row's result depends on another."""
        plan = plan_rows(batch, cache.geometry.page_size)
        self._buffers.reserve(batch.rows)
        residual = self._buffers.rows("residual", batch.rows)
        self.ops.embed(self._weights.embedding, np.ascontiguousarray(batch.tokens), residual)
        last = self.config.layers - 1
        for index in range(last):
            self._attend(index, residual, plan, cache.blocks[index])
            layer_counter[0] += 1
            self._feed_forward(index, residual)
        return self._last_layer(batch, plan, cache.blocks[last], layer_counter)

    def _last_layer(
        self, batch: RaggedBatch, plan: RowPlan, block: Weights, layer_counter: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """The last layer computes only what the wanted logits need; without any, it ends with the append."""
        last = self.config.layers - 1
        residual = self._buffers.rows("residual", batch.rows)
        wanted = batch.logit_rows
        if len(wanted) == 0:
            self._append_keys_and_values(last, self._attention_input(last, residual), plan, block)
            layer_counter[0] += 1
            return np.empty((0, self.config.vocab), np.float32)
        self._attend(last, residual, plan, block)
        layer_counter[0] += 1
        chosen = np.ascontiguousarray(residual[wanted])
        chosen_delta = np.ascontiguousarray(self._buffers.rows("delta", batch.rows)[wanted])
        self._buffers.rows("delta", len(wanted))[:] = chosen_delta
        self._feed_forward(last, chosen)
        return self._logits(chosen)

    def _attend(self, index: int, residual: Floats, plan: RowPlan, block: Weights) -> None:
        """Leaves the layer's attention output projection in `delta`."""
        config, weights, rows = self.config, self._weights.layers[index], len(residual)
        normed = self._attention_input(index, residual)
        self._append_keys_and_values(index, normed, plan, block)
        query = self._buffers.rows("query", rows)
        self.ops.linear(normed, weights.query, query)
        heads = query.reshape(rows, config.heads, config.head_dim)
        self.ops.rotate(heads, self._rotation(plan), plan)
        attended = self._buffers.rows("attended", rows)
        self.ops.attention(heads, block, plan, attended.reshape(heads.shape))
        self.ops.linear(attended, weights.output, self._buffers.rows("delta", rows))

    def _attention_input(self, index: int, residual: Floats) -> Floats:
        rows = len(residual)
        normed = self._buffers.rows("normed", rows)
        weight, epsilon = self._weights.layers[index].attention_norm, self.config.rms_eps
        if index == 0:
            self.ops.rms_norm(residual, weight, epsilon, normed)
        else:
            self.ops.add_rms_norm(residual, self._buffers.rows("delta", rows), weight, epsilon, normed)
        return normed

    def _append_keys_and_values(self, index: int, normed: Floats, plan: RowPlan, block: Weights) -> None:
        config, weights, rows = self.config, self._weights.layers[index], len(normed)
        key, value = self._buffers.rows("key", rows), self._buffers.rows("value", rows)
        self.ops.linear(normed, weights.key, key)
        self.ops.linear(normed, weights.value, value)
        shape = (rows, config.kv_heads, config.head_dim)
        keys = key.reshape(shape)
        self.ops.rotate(keys, self._rotation(plan), plan)
        self.ops.append(keys, value.reshape(shape), block, plan)

    def _rotation(self, plan: RowPlan) -> Any:
        return self._rotary.up_to(int(plan.position.max()) + 1)

    def _feed_forward(self, index: int, residual: Floats) -> None:
        """Adds the attention's `delta` to the residual, and leaves the MLP's output in `delta`."""
        weights, rows = self._weights.layers[index], len(residual)
        normed, delta = self._buffers.rows("normed", rows), self._buffers.rows("delta", rows)
        gate, up = self._buffers.rows("gate", rows), self._buffers.rows("up", rows)
        self.ops.add_rms_norm(residual, delta, weights.mlp_norm, self.config.rms_eps, normed)
        self.ops.linear(normed, weights.gate, gate)
        self.ops.linear(normed, weights.up, up)
        self.ops.silu_mul(gate, up)
        self.ops.linear(gate, weights.down, delta)

    def _logits(self, residual: Floats) -> NDArray[np.float32]:
        rows = len(residual)
        normed, delta = self._buffers.rows("normed", rows), self._buffers.rows("delta", rows)
        self.ops.add_rms_norm(residual, delta, self._weights.norm, self.config.rms_eps, normed)
        logits = np.empty((rows, self.config.vocab), np.float32)
        self.ops.linear(normed, self._weights.head, logits)
        return logits


def plan_rows(batch: RaggedBatch, page_size: int) -> RowPlan:
    """Position, page and slot of every row. Raises ValueError where a sequence has fewer pages than it needs."""
    counts = np.diff(batch.row_start)
    sequence = np.repeat(np.arange(batch.sequences), counts)
    offset = np.arange(batch.rows) - batch.row_start[:-1][sequence]
    position = batch.first_position[sequence] + offset
    page_index = position // page_size
    if batch.rows and int(page_index.max()) >= batch.page_table.shape[1]:
        raise ValueError(
            f"position {int(position.max())} lies behind the page table's {batch.page_table.shape[1]} pages"
        )
    return RowPlan(
        row_start=np.ascontiguousarray(batch.row_start, np.int64),
        first_position=np.ascontiguousarray(batch.first_position, np.int64),
        page_table=np.ascontiguousarray(batch.page_table, np.int64),
        position=position.astype(np.int64, copy=False),
        page=batch.page_table[sequence, page_index].astype(np.int64, copy=False),
        slot=(position % page_size).astype(np.int64, copy=False),
    )
