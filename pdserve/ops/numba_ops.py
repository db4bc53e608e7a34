"""The operations by compiled kernels. A row's result is bitwise the same whatever else is computed with it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from pdserve.ops import elementwise
from pdserve.ops.api import Floats, Indices, Rotation, RowPlan, Weights
from pdserve.ops.linear import ROWS, linear
from pdserve.ops.paged_attention import QUERY_ROWS, paged_attention


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
        if self._packed.shape[1] < x.shape[1]:
            self._packed = np.empty((ROWS, x.shape[1] + 8), np.float32)
        linear(x, weight, out, self._packed)

    def rms_norm(self, x: Floats, weight: Floats, epsilon: float, out: Floats) -> None:
        elementwise.rms_norm(x, weight, epsilon, out)

    def add_rms_norm(self, residual: Floats, delta: Floats, weight: Floats, epsilon: float, out: Floats) -> None:
        elementwise.add_rms_norm(residual, delta, weight, epsilon, out)

    def rotate(self, x: Floats, rotation: Rotation, plan: RowPlan) -> None:
        elementwise.rotate(x, rotation.cos, rotation.sin, plan.position)

    def append(self, keys: Floats, values: Floats, block: Weights, plan: RowPlan) -> None:
        elementwise.append(keys, block, 0, plan.page, plan.slot)
        elementwise.append(values, block, 1, plan.page, plan.slot)

    def attention(self, queries: Floats, block: Weights, plan: RowPlan, out: Floats) -> None:
        paged_attention(
            queries, block, plan.row_start, plan.first_position, plan.page_table, out, *self._scratch(queries, block)
        )

    def silu_mul(self, gate: Floats, up: Floats) -> None:
        elementwise.silu_mul(gate, up)

    def _scratch(self, queries: Floats, block: Weights) -> tuple[Floats, ...]:
        """packed queries, key columns, scores, sums, softmax state of one attention tile."""
        rows = QUERY_ROWS * (queries.shape[1] // block.shape[2])
        page_size, dim = block.shape[3:]
        shapes = (rows, dim), (dim, page_size), (rows, page_size), (rows, dim), (3, rows)
        if tuple(array.shape for array in self._tile) != shapes:
            self._tile = tuple(np.empty(shape, np.float32) for shape in shapes)
        return self._tile


def warm_up(dtype: str, report: Callable[[str], None]) -> None:
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
    report(f"kernels: numba, {dtype}, ready in {time.monotonic() - started:.1f} s")


class _SlowReport:
    """Says once that compilation is under way."""

    def __init__(self, report: Callable[[str], None], started: float) -> None:
        self._report, self._started, self._said = report, started, False

    def __call__(self) -> None:
        if not self._said and time.monotonic() - self._started > 1.0:
            self._report("compiling kernels (once; cached for later runs)")
            self._said = True
