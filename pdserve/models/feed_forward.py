"""The gated MLP, and mixtures of such experts over one rank or several."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdserve.models.step import Scratch
from pdserve.ops.api import Floats, Indices, Ops, Routing, Weights
from pdserve.parallel.group import ModelParallel, parts, share


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """`(outputs, inputs)`, float32 or bf16 as uint16; of several ranks a slice of the intermediate width."""

    gate: Weights
    up: Weights
    down: Weights


class GatedFeedForward:
    """SwiGLU; implements `FeedForward`."""

    collective = False

    def __init__(self, weights: GatedWeights, ops: Ops, scratch: Scratch) -> None:
        self._weights, self._ops, self._scratch = weights, ops, scratch

    def forward(self, normed: Floats, out: Floats) -> None:
        gated(self._weights, normed, out, self._ops, self._scratch)


def gated(weights: GatedWeights, rows: Floats, out: Floats, ops: Ops, scratch: Scratch) -> None:
    gate = scratch.rows("gate", len(rows), len(weights.gate))
    up = scratch.rows("up", len(rows), len(weights.up))
    ops.linear(rows, weights.gate, gate)
    ops.linear(rows, weights.up, up)
    ops.silu_mul(gate, up)
    ops.linear(gate, weights.down, out)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """`experts` are this rank's: its own ones under expert parallelism, else its slice of every one."""

    router: Weights  # (all experts, hidden)
    choice_bias: Floats  # (all experts,), or empty
    experts: tuple[GatedWeights, ...]
    shared: GatedWeights | None


class ExpertFeedForward:
    """A mixture of experts; implements `FeedForward`.

    Rows travel to their experts' ranks and back, sorted by expert. Each row's results are summed by the rank that
    routed it, in order of experts, so that neither its company nor the number of expert-parallel ranks changes them.
    """

    def __init__(
        self, weights: ExpertWeights, routing: Routing, parallel: ModelParallel, ops: Ops, scratch: Scratch
    ) -> None:
        self._weights, self._routing = weights, routing
        self._tp, self._ep = parallel.tp, parallel.ep
        self._ops, self._scratch = ops, scratch

    @property
    def collective(self) -> bool:
        return self._ep.size > 1

    def forward(self, normed: Floats, out: Floats) -> None:
        own = slice(0, len(normed))
        if self.collective:  # tensor-parallel ranks hold the same rows: each routes a part of them
            own = share(len(normed), self._tp)
            out[...] = 0
        self._routed(normed[own], out[own])
        if self._weights.shared is not None:
            shared = self._scratch.rows("shared", *out.shape)
            gated(self._weights.shared, normed, shared, self._ops, self._scratch)
            out += shared

    def _routed(self, rows: Floats, out: Floats) -> None:
        count, top_k = len(self._weights.router), self._routing.top_k
        logits = self._scratch.rows("router", len(rows), count)
        self._ops.linear(rows, self._weights.router, logits)
        experts, weights = np.empty((len(rows), top_k), np.int64), np.empty((len(rows), top_k), np.float32)
        self._ops.route(logits, self._weights.choice_bias, self._routing, experts, weights)
        order = np.argsort(experts.reshape(-1), kind="stable")
        results = self._at_experts(rows[order // top_k], np.bincount(experts.reshape(-1), minlength=count))
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        self._ops.combine(results, place.reshape(experts.shape), weights, out)

    def _at_experts(self, rows: Floats, counts: Indices) -> Floats:
        """Results of rows sorted by expert; `counts` are each expert's, of all experts."""
        if not self.collective:
            return self._computed(rows, counts)
        size, own = self._ep.size, len(self._weights.experts)
        dealt = [counts[part] for part in parts(len(counts), size)]
        wanted = self._ep.all_to_all(counts, [len(part) for part in dealt], [own] * size).reshape(size, own)
        sent, received = [int(part.sum()) for part in dealt], [int(total) for total in wanted.sum(1)]
        arrived = self._ep.all_to_all(rows, sent, received)
        order = np.argsort(np.repeat(np.tile(np.arange(own), size), wanted.reshape(-1)), kind="stable")
        computed = self._computed(arrived[order], wanted.sum(0))
        returning = np.empty_like(computed)
        returning[order] = computed
        return self._ep.all_to_all(returning, received, sent)

    def _computed(self, rows: Floats, counts: Indices) -> Floats:
        results = np.empty_like(rows)
        ends = np.cumsum(counts)
        for index in np.flatnonzero(counts):
            part = slice(int(ends[index] - counts[index]), int(ends[index]))
            gated(self._weights.experts[index], rows[part], results[part], self._ops, self._scratch)
        return results
