"""From weights to a model: which parts the layers of a family are made of, and which slices of them a rank holds."""

from __future__ import annotations

import numpy as np

from pdserve.errors import ModelError
from pdserve.models.api import ExpertShape, LatentShape, ModelConfig
from pdserve.models.decoder import Decoder, Ends, Layer, Runtime, vocabulary_share
from pdserve.models.feed_forward import ExpertFeedForward, ExpertWeights, GatedFeedForward, GatedWeights
from pdserve.models.grouped import GroupedAttention, GroupedWeights
from pdserve.models.latent import LatentAttention, LatentWeights
from pdserve.models.rope import RotaryTable, inverse_frequencies, rotary_scale, softmax_scale
from pdserve.models.step import Attention, FeedForward
from pdserve.models.weights import WeightReader
from pdserve.ops.api import Floats
from pdserve.parallel.group import share
from policies.sharding import ShardingError, heads_per_rank


class Builder:
    """Makes one rank's model of a checkpoint; `rope` are its rotary settings. Raises ModelError."""

    def __init__(self, reader: WeightReader, rope: dict[str, object], runtime: Runtime) -> None:
        self._reader, self._rope, self._runtime = reader, rope, runtime
        self._config, self._tp = reader.config, runtime.parallel.tp
        check_ranks(self._config, self._tp.size)

    def model(self) -> Decoder:
        config, reader = self._config, self._reader
        whole, part = (config.vocab, config.hidden), vocabulary_share(config.vocab, self._runtime.parallel)
        layers = tuple(self._layer(index) for index in range(config.layers))
        embedding = reader.rows("model.embed_tokens.weight", whole, part)
        head = embedding if config.tied_embeddings else reader.rows("lm_head.weight", whole, part)
        norm = reader.vector("model.norm.weight", config.hidden)
        ends = Ends(embedding, norm, head, reader.behind(config.layers))
        return Decoder(config, ends, layers, self._rotary(), self._runtime)

    def _rotary(self) -> RotaryTable:
        config = self._config
        return RotaryTable(
            inverse_frequencies(self._rope, config.rope_dim),
            config.context,
            scale=rotary_scale(self._rope),
            interleaved=config.latent is not None and config.latent.interleaved,
        )

    def _layer(self, index: int) -> Layer:
        config, prefix = self._config, f"model.layers.{index}."
        attention: Attention
        if config.latent is not None:
            attention = self._latent_attention(f"{prefix}self_attn.", config.latent)
        else:
            attention = self._grouped_attention(f"{prefix}self_attn.")
        return Layer(
            attention_norm=self._reader.vector(f"{prefix}input_layernorm.weight", config.hidden),
            attention=attention,
            mlp_norm=self._reader.vector(f"{prefix}post_attention_layernorm.weight", config.hidden),
            feed_forward=self._feed_forward(index, f"{prefix}mlp."),
        )

    def _grouped_attention(self, prefix: str) -> GroupedAttention:
        config, reader, dim = self._config, self._reader, self._config.head_dim
        assert config.kv_heads is not None
        own = share(config.heads, self._tp)
        first = config.kv_heads * self._tp.rank // self._tp.size
        held = slice(first * dim, (first + heads_per_rank(config.kv_heads, self._tp.size)) * dim)
        queries, keys = (config.heads * dim, config.hidden), (config.kv_heads * dim, config.hidden)
        columns = slice(own.start * dim, own.stop * dim)
        weights = GroupedWeights(
            query=reader.rows(f"{prefix}q_proj.weight", queries, columns),
            key=reader.rows(f"{prefix}k_proj.weight", keys, held),
            value=reader.rows(f"{prefix}v_proj.weight", keys, held),
            output=reader.columns(f"{prefix}o_proj.weight", (config.hidden, config.heads * dim), columns),
            query_norm=self._head_norm(f"{prefix}q_norm.weight"),
            key_norm=self._head_norm(f"{prefix}k_norm.weight"),
        )
        return GroupedAttention(weights, dim, config.rms_eps, self._runtime.ops, self._runtime.scratch)

    def _head_norm(self, name: str) -> Floats | None:
        return self._reader.vector(name, self._config.head_dim) if self._config.head_norms else None

    def _latent_attention(self, prefix: str, shape: LatentShape) -> LatentAttention:
        config, reader = self._config, self._reader
        own, rank, hidden = share(config.heads, self._tp), shape.rank, config.hidden
        query_dim, made_dim = shape.nope + shape.rope, shape.nope + shape.value
        queries = slice(own.start * query_dim, own.stop * query_dim)
        made = slice(own.start * made_dim, own.stop * made_dim)
        values = slice(own.start * shape.value, own.stop * shape.value)
        narrow = shape.query_rank
        query, inputs = ("q_proj", hidden) if narrow is None else ("q_b_proj", narrow)
        compress = reader.matrix(f"{prefix}kv_a_proj_with_mqa.weight", rank + shape.rope, hidden)
        expand = reader.rows(f"{prefix}kv_b_proj.weight", (config.heads * made_dim, rank), made)
        weights = LatentWeights(
            query_compress=None if narrow is None else reader.matrix(f"{prefix}q_a_proj.weight", narrow, hidden),
            query_norm=None if narrow is None else reader.vector(f"{prefix}q_a_layernorm.weight", narrow),
            query=reader.rows(f"{prefix}{query}.weight", (config.heads * query_dim, inputs), queries),
            compress=compress[:rank],
            key_rope=compress[rank:],
            compress_norm=reader.vector(f"{prefix}kv_a_layernorm.weight", rank),
            expand=expand.reshape(-1, made_dim, rank),
            output=reader.columns(f"{prefix}o_proj.weight", (hidden, config.heads * shape.value), values),
        )
        scale = softmax_scale(self._rope, query_dim)
        return LatentAttention(weights, shape, scale, self._runtime.ops, self._runtime.scratch)

    def _feed_forward(self, index: int, prefix: str) -> FeedForward:
        config, runtime = self._config, self._runtime
        if config.experts is not None and index in config.experts.layers:
            weights = self._experts(prefix, config.experts)
            return ExpertFeedForward(weights, config.experts.routing, runtime.parallel, runtime.ops, runtime.scratch)
        return GatedFeedForward(self._gated(prefix, config.intermediate), runtime.ops, runtime.scratch)

    def _experts(self, prefix: str, shape: ExpertShape) -> ExpertWeights:
        reader, ep = self._reader, self._runtime.parallel.ep
        own = share(shape.count, ep)
        bias = f"{prefix}gate.e_score_correction_bias"
        shared = f"{prefix}shared_experts."
        return ExpertWeights(
            router=reader.matrix(f"{prefix}gate.weight", shape.count, self._config.hidden),
            choice_bias=reader.vector(bias, shape.count) if shape.choice_bias else np.empty(0, np.float32),
            experts=tuple(
                self._gated(f"{prefix}experts.{expert}.", shape.intermediate, sliced=ep.size == 1)
                for expert in range(own.start, own.stop)
            ),
            shared=self._gated(shared, shape.shared_intermediate) if shape.shared_intermediate else None,
        )

    def _gated(self, prefix: str, width: int, *, sliced: bool = True) -> GatedWeights:
        reader, hidden = self._reader, self._config.hidden
        part = share(width, self._tp) if sliced else slice(0, width)
        return GatedWeights(
            gate=reader.rows(f"{prefix}gate_proj.weight", (width, hidden), part),
            up=reader.rows(f"{prefix}up_proj.weight", (width, hidden), part),
            down=reader.columns(f"{prefix}down_proj.weight", (hidden, width), part),
        )


def check_ranks(config: ModelConfig, tp: int) -> None:
    """Raises ModelError where `tp` ranks cannot share the model's heads."""
    if config.heads % tp:
        raise ModelError(
            f"{config.name} has {config.heads} heads, which {tp} tensor-parallel ranks cannot share evenly: "
            f"choose a tp that divides {config.heads}"
        )
    try:
        rank_kv_heads(config, tp)
    except ShardingError as error:
        raise ModelError(f"{config.name}: {error}") from error


def rank_kv_heads(config: ModelConfig, tp: int) -> int | None:
    """KV heads in the pages of one of `tp` ranks; None for a latent, which every rank holds. Raises ShardingError."""
    return None if config.kv_heads is None else heads_per_rank(config.kv_heads, tp)
