"""What the engine needs of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdserve.attention.batch import RaggedBatch
from pdserve.kv.memory import KvMemory
from pdserve.ops.api import Routing


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Multi-head latent attention: a token's cache is one vector of `rank` elements and `rope` rotated ones."""

    rank: int
    rope: int
    nope: int  # of a query or key head, beside its rope part
    value: int  # of a value head
    query_rank: int | None  # None: queries come straight from the hidden state
    interleaved: bool = True  # rotary pairs are neighbours, not halves


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The mixture-of-experts layers; the others are dense."""

    count: int
    intermediate: int  # of one expert
    shared_intermediate: int  # of the expert that every row passes; 0: there is none
    routing: Routing
    layers: frozenset[int]
    choice_bias: bool  # whether a bias per expert takes part in the choice


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a model; names follow Hugging Face's config.json.

    `kv_heads` is the whole model's; None: a latent, and then `head_dim` is what a token's cache holds.
    """

    name: str
    fingerprint: str  # digest of config and weights: two nodes compare it when they meet
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int | None
    head_dim: int
    vocab: int
    context: int  # tokens, max_position_embeddings
    rope_theta: float
    rms_eps: float
    tied_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    head_norms: bool = False  # queries and keys are normalised head by head
    latent: LatentShape | None = None
    experts: ExpertShape | None = None

    @property
    def rope_dim(self) -> int:
        """Elements of a head that turn with the position."""
        return self.latent.rope if self.latent else self.head_dim


class Model(Protocol):
    @property
    def config(self) -> ModelConfig: ...

    def forward(self, batch: RaggedBatch, cache: KvMemory, layer_counter: NDArray[np.int64]) -> NDArray[np.float32]:
        """Appends the batch's keys and values to the cache, and returns logits `(len(batch.logit_rows), vocab)`.

        `layer_counter` is `(1,) int64` in memory that another thread polls; it is bumped by one for every layer,
        after that layer's keys and values are in the cache and its attention output projection is done. It ends
        exactly `config.layers` higher. Where no logits are wanted, work behind the last layer's append is left out.

        Of several ranks, all of a replica call it with the same batch; the logits come at the leader (tensor-parallel
        rank 0), the others return `(0, vocab)`. A batch may be empty: replicas that share experts step together.
        """
        ...
