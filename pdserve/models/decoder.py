"""A decoder over a ragged batch and a paged cache: what all families share. Layers are made of parts (see step.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pdserve.attention.batch import RaggedBatch
from pdserve.kv.memory import KvMemory
from pdserve.models.api import ModelConfig
from pdserve.models.rope import RotaryTable
from pdserve.models.step import Attention, FeedForward, Scratch, Step, plan_rows
from pdserve.ops.api import Floats, Ops, Weights
from pdserve.parallel.group import ModelParallel, parts, share


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Floats
    attention: Attention
    mlp_norm: Floats
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class Ends:
    """What stands before and behind the layers: `(vocabulary, hidden)`, of several ranks a slice of the vocabulary.

    `drafter` holds the tensors of layers behind the last one (multi-token prediction), by name, as the files have them.
    """

    embedding: Weights
    norm: Floats
    head: Weights  # the embedding itself where they are tied
    drafter: Mapping[str, Weights] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a model computes with; one thread at a time, as the working memory is shared by its layers."""

    ops: Ops
    scratch: Scratch
    parallel: ModelParallel


class Decoder:
    """Implements `Model`. One thread at a time may call `forward`."""

    def __init__(
        self, config: ModelConfig, ends: Ends, layers: tuple[Layer, ...], rotary: RotaryTable, runtime: Runtime
    ) -> None:
        self.config = config
        self.ends = ends
        self.ops = runtime.ops
        self.parallel = runtime.parallel
        self._layers = layers
        self._rotary = rotary
        self._scratch = runtime.scratch

    def forward(self, batch: RaggedBatch, cache: KvMemory, layer_counter: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Model.forward`. Rows are independent: in deterministic ops no row's result depends on another."""
        plan = plan_rows(batch, cache.geometry.page_size)
        step = Step(plan, self._rotary.up_to(int(plan.position.max(initial=0)) + 1))
        residual = self._embedded(batch.tokens)
        for index in range(self.config.layers - 1):
            self._attend(index, residual, cache, step)
            layer_counter[0] += 1
            self._feed_forward(index, residual)
        return self._last_layer(batch, cache, step, layer_counter)

    def _last_layer(
        self, batch: RaggedBatch, cache: KvMemory, step: Step, layer_counter: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """The last layer computes only what the wanted logits need; without any, it ends with the append."""
        last, wanted = self.config.layers - 1, batch.logit_rows
        residual, delta = self._rows("residual", batch.rows), self._rows("delta", batch.rows)
        if len(wanted):
            self._attend(last, residual, cache, step)
        else:
            layer = self._layers[last]
            layer.attention.append(self._attention_input(last, residual), cache.layer(last), step)
            self.parallel.tp.all_reduce(np.zeros(1, np.float32))  # the counter speaks for all ranks, as in other layers
        layer_counter[0] += 1
        if not len(wanted) and not self._layers[last].feed_forward.collective:
            return np.empty((0, self.config.vocab), np.float32)
        chosen, chosen_delta = residual[wanted], delta[wanted]
        self._rows("delta", len(wanted))[:] = chosen_delta
        self._feed_forward(last, chosen)
        return self._logits(chosen)

    def _embedded(self, tokens: NDArray[np.int64]) -> Floats:
        residual = self._rows("residual", len(tokens))
        tp = self.parallel.tp
        if tp.size == 1:
            self.ops.embed(self.ends.embedding, np.ascontiguousarray(tokens), residual)
            return residual
        own = vocabulary_share(self.config.vocab, self.parallel)
        here = (tokens >= own.start) & (tokens < own.stop)
        self.ops.embed(self.ends.embedding, np.where(here, tokens - own.start, 0), residual)
        residual[~here] = 0
        tp.all_reduce(residual)
        return residual

    def _attend(self, index: int, residual: Floats, cache: KvMemory, step: Step) -> None:
        """Leaves the layer's attention output projection, summed over the ranks, in `delta`."""
        normed, delta = self._attention_input(index, residual), self._rows("delta", len(residual))
        self._layers[index].attention.attend(normed, cache.layer(index), step, delta)
        self.parallel.tp.all_reduce(delta)

    def _attention_input(self, index: int, residual: Floats) -> Floats:
        normed = self._rows("normed", len(residual))
        weight, epsilon = self._layers[index].attention_norm, self.config.rms_eps
        if index == 0:
            self.ops.rms_norm(residual, weight, epsilon, normed)
        else:
            self.ops.add_rms_norm(residual, self._rows("delta", len(residual)), weight, epsilon, normed)
        return normed

    def _feed_forward(self, index: int, residual: Floats) -> None:
        """Adds the attention's `delta` to the residual, and leaves the feed-forward part's output in `delta`."""
        layer = self._layers[index]
        normed, delta = self._rows("normed", len(residual)), self._rows("delta", len(residual))
        self.ops.add_rms_norm(residual, delta, layer.mlp_norm, self.config.rms_eps, normed)
        layer.feed_forward.forward(normed, delta)
        self.parallel.tp.all_reduce(delta)

    def _logits(self, residual: Floats) -> NDArray[np.float32]:
        rows, vocab, tp = len(residual), self.config.vocab, self.parallel.tp
        normed, delta = self._rows("normed", rows), self._rows("delta", rows)
        self.ops.add_rms_norm(residual, delta, self.ends.norm, self.config.rms_eps, normed)
        logits = np.empty((rows, len(self.ends.head)), np.float32)
        self.ops.linear(normed, self.ends.head, logits)
        if tp.size == 1:
            return logits
        widest = -(-vocab // tp.size)
        padded = np.zeros((rows, widest), np.float32)
        padded[:, : logits.shape[1]] = logits
        gathered = tp.gather(padded) if rows else None
        if gathered is None:
            return np.empty((0, vocab), np.float32)
        widths = [part.stop - part.start for part in parts(vocab, tp.size)]
        return np.concatenate([part[:, :width] for part, width in zip(gathered, widths, strict=True)], axis=1)

    def _rows(self, name: str, rows: int) -> Floats:
        return self._scratch.rows(name, rows, self.config.hidden)


def vocabulary_share(vocab: int, parallel: ModelParallel) -> slice:
    """The token ids whose embedding and logits this rank computes."""
    return share(vocab, parallel.tp)
