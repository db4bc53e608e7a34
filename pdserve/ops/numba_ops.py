"""The operations by compiled kernels. A row's result is bitwise the same whatever else is computed with it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from pdserve.ops import elementwise
from pdserve.ops.api import COMMON, Floats, Indices, Needs, Rotation, Routing, RowPlan, Weights
from pdserve.ops.latent import absorb, expand
from pdserve.ops.linear import ROWS, linear
from pdserve.ops.paged_attention import QUERY_ROWS, TILE_ROWS, paged_attention
from pdserve.ops.routing import combine, route


class NumbaOps:
    """One instance per thread: it owns the kernels' scratch memory. head_dim must be a multiple
    of 16 and page_size one of 8."""

    name = "numba"
    deterministic = True

    def __init__(self) -> None:
        self._packed = np.empty((ROWS, 0), np.float32)
        self._tile: tuple[Floats, ...] = ()

    def embed(self, table: Weights, tokens: Indices, out: Floats) -> None:
        elementwise.embed(table, tokens, out)

    def linear(self, x: Floats, weight: Weights, out: Floats) -> None:
        linear(x, weight, out, self._packed_rows(x.shape[1]))

    def rms_norm(self, x: Floats, weight: Floats, epsilon: float, out: Floats) -> None:
        elementwise.rms_norm(x, weight, epsilon, out)

    def add_rms_norm(self, residual: Floats, delta: Floats, weight: Floats, epsilon: float, out: Floats) -> None:
        elementwise.add_rms_norm(residual, delta, weight, epsilon, out)

    def rotate(self, x: Floats, rotation: Rotation, plan: RowPlan) -> None:
        elementwise.rotate(x, rotation.cos, rotation.sin, rotation.interleaved, plan.position)

    def append(self, keys: Floats, values: Floats, block: Weights, plan: RowPlan) -> None:
        elementwise.append(keys, block, 0, plan.page, plan.slot)
        elementwise.append(values, block, 1, plan.page, plan.slot)

    def append_latent(self, latents: Floats, block: Weights, plan: RowPlan) -> None:
        pages, page_size, dim = block.shape
        as_heads = block.reshape(pages, 1, 1, page_size, dim)
        elementwise.append(latents.reshape(-1, 1, dim), as_heads, 0, plan.page, plan.slot)

    def attention(self, queries: Floats, block: Weights, plan: RowPlan, out: Floats) -> None:
        kv_heads, page_size, dim = block.shape[2:]
        page, value, head, token = block.strides[:4]
        strides = block.itemsize, page, value, head, token
        scale = np.float32(1.0) / np.sqrt(np.float32(dim))
        paged_attention(
            queries, block.dtype.type(0), block.ctypes.data, strides, kv_heads, scale,
            plan.row_start, plan.first_position, plan.page_table, out,
            *self._scratch(queries.shape[1] // kv_heads, page_size, dim, dim),
        )  # fmt: skip

    def latent_attention(self, queries: Floats, block: Weights, plan: RowPlan, scale: float, out: Floats) -> None:
        page, token = block.strides[:2]
        paged_attention(
            queries, block.dtype.type(0), block.ctypes.data, (block.itemsize, page, 0, 0, token), 1, np.float32(scale),
            plan.row_start, plan.first_position, plan.page_table, out,
            *self._scratch(queries.shape[1], block.shape[1], queries.shape[2], out.shape[2]),
        )  # fmt: skip

    def absorb(self, queries: Floats, weight: Weights, nope: int, out: Floats) -> None:
        absorb(queries, weight, nope, out)

    def expand(self, latents: Floats, weight: Weights, nope: int, out: Floats) -> None:
        expand(latents, weight, nope, out, self._packed_rows(weight.shape[2]))

    def route(self, logits: Floats, bias: Floats, routing: Routing, experts: Indices, weights: Floats) -> None:
        groups = routing.groups, routing.kept_groups
        route(logits, bias, routing.sigmoid, groups, routing.normalise, routing.scale, experts, weights)

    def combine(self, results: Floats, place: Indices, weights: Floats, out: Floats) -> None:
        combine(results, place, weights, out)

    def silu_mul(self, gate: Floats, up: Floats) -> None:
        elementwise.silu_mul(gate, up)

    def _packed_rows(self, inputs: int) -> Floats:
        if self._packed.shape[1] < inputs:
            self._packed = np.empty((ROWS, inputs + 8), np.float32)
        return self._packed

    def _scratch(self, group: int, page_size: int, dim: int, value_dim: int) -> tuple[Floats, ...]:
        """packed queries, key columns, scores, sums, softmax state of one attention tile."""
        rows = group * max(1, min(QUERY_ROWS, TILE_ROWS // group))
        shapes = (rows, dim), (dim, page_size), (rows, page_size), (rows, value_dim), (3, rows)
        if tuple(array.shape for array in self._tile) != shapes:
            self._tile = tuple(np.empty(shape, np.float32) for shape in shapes)
        return self._tile


def warm_up(dtype: str, report: Callable[[str], None], needs: Needs = COMMON) -> None:
    """Compiles the kernels of one dtype, or loads them from the cache; says so where that takes long."""
    started = time.monotonic()
    report_slow = _SlowReport(report, started)
    weights = np.uint16 if dtype == "bf16" else np.float32
    ops = NumbaOps()
    block = np.zeros((1, 2, 1, 8, 16), weights)
    x, delta, norm = np.zeros((1, 16), np.float32), np.zeros((1, 16), np.float32), np.ones(16, np.float32)
    heads = x.reshape(1, 1, 16)
    zero, table = np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
    plan = RowPlan(np.array([0, 1], np.int64), zero, table, zero, zero, zero)
    rotation = Rotation(np.ones((1, 8), np.float32), np.zeros((1, 8), np.float32))
    matrix = np.zeros((16, 16), weights)
    matrix.flags.writeable = False  # as mapped weights are
    ops.embed(matrix, zero, x)
    ops.rms_norm(x, norm, 1e-5, delta)
    ops.add_rms_norm(x, delta, norm, 1e-5, delta)
    report_slow()
    ops.linear(x, matrix, delta)
    report_slow()
    ops.rotate(heads, rotation, plan)
    ops.append(heads, heads, block, plan)
    ops.attention(heads, block, plan, delta.reshape(1, 1, 16))
    ops.silu_mul(x, delta)
    if needs.latents:
        report_slow()
        _warm_up_latents(ops, weights, plan)
    if needs.experts:
        report_slow()
        _warm_up_experts(ops, zero.reshape(1, 1))
    report(f"kernels: numba, {dtype}, ready in {time.monotonic() - started:.1f} s")


def _warm_up_latents(ops: NumbaOps, weights: type[np.generic], plan: RowPlan) -> None:
    query, value = np.zeros((1, 1, 32), np.float32), np.zeros((1, 1, 16), np.float32)
    made = np.zeros((1, 32, 16), weights)
    made.flags.writeable = False  # as mapped weights are
    block = np.zeros((1, 8, 32), weights)
    ops.append_latent(query[0], block, plan)
    ops.absorb(query, made, 16, query.copy())
    ops.latent_attention(query, block, plan, 1.0, value)
    ops.expand(value, made, 16, value.copy())


def _warm_up_experts(ops: NumbaOps, experts: Indices) -> None:
    logits, nothing, row = np.zeros((1, 4), np.float32), np.empty(0, np.float32), np.zeros((1, 16), np.float32)
    weights = np.empty((1, 1), np.float32)
    ops.route(logits, nothing, Routing(1), experts.copy(), weights)
    ops.combine(row, experts, weights, row.copy())


class _SlowReport:
    """Says once that compilation is under way."""

    def __init__(self, report: Callable[[str], None], started: float) -> None:
        self._report, self._started, self._said = report, started, False

    def __call__(self) -> None:
        if not self._said and time.monotonic() - self._started > 1.0:
            self._report("compiling kernels (once; cached for later runs)")
            self._said = True
