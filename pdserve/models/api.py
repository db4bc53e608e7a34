"""What the engine needs of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdserve.attention.batch import RaggedBatch
from pdserve.kv.memory import KvMemory


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-family model; names follow Hugging Face's config.json."""

    name: str
    fingerprint: str  # digest of config and weights: two nodes compare it when they meet
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int  # tokens, max_position_embeddings
    rope_theta: float
    rms_eps: float
    tied_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


class Model(Protocol):
    @property
    def config(self) -> ModelConfig: ...

    def forward(self, batch: RaggedBatch, cache: KvMemory, layer_counter: NDArray[np.int64]) -> NDArray[np.float32]:
        """Appends the batch's keys and values to the cache, and returns logits `(len(batch.logit_rows), vocab)`.

        `layer_counter` is `(1,) int64` in memory that another thread polls; it is bumped by one for every layer,
        after that layer's keys and values are in the cache and its attention output projection is done. It ends
        exactly `config.layers` higher. Where no logits are wanted, work behind the last layer's append is left out.
        """
        ...
