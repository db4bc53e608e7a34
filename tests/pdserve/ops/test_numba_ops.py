"""The kernels against torch in float64 or float32, and their contract: no row depends on its company, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from pdserve.models.safetensors_file import convert
from pdserve.ops.api import Rotation, RowPlan
from pdserve.ops.numba_ops import NumbaOps
from pdserve.ops.torch_ops import TorchOps

DTYPES = ("fp32", "bf16")


def random(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stored(array: NDArray[np.float32], dtype: str) -> NDArray:
    weights = convert(array, dtype)
    weights.flags.writeable = False  # as mapped weights are
    return weights


def linear(x: NDArray[np.float32], weight: NDArray) -> NDArray[np.float32]:
    out = np.full((len(x), len(weight)), np.nan, np.float32)
    NumbaOps().linear(np.ascontiguousarray(x), weight, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 64, 9), (2, 576, 50), (5, 48, 7), (33, 1536, 192), (3, 40, 5)]
)
def test_linear_agrees_with_float64(dtype: str, rows: int, inputs: int, outputs: int) -> None:
    x, weight = random(rows, inputs), stored(random(outputs, inputs, seed=1), dtype)
    exact = x.astype(np.float64) @ convert(weight, "fp32").astype(np.float64).T
    np.testing.assert_allclose(linear(x, weight), exact, rtol=0, atol=1e-5 * np.sqrt(inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [576, 72])
def test_an_output_of_linear_depends_on_its_row_and_its_weights_alone(dtype: str, inputs: int) -> None:
    x, weight = random(37, inputs), stored(random(700, inputs, seed=1), dtype)
    together = linear(x, weight)
    for first, last in ((0, 1), (5, 7), (36, 37), (10, 30)):
        assert np.array_equal(linear(x[first:last], weight), together[first:last])
    for first, last in ((0, 1), (1, 3), (498, 700)):
        assert np.array_equal(linear(x, weight[first:last]), together[:, first:last])


def test_rms_norm_with_residual() -> None:
    ops, oracle = NumbaOps(), TorchOps()
    for hidden in (64, 576, 40):
        x, delta, weight = random(5, hidden), random(5, hidden, seed=1), random(hidden, seed=2)
        ours, theirs = np.empty_like(x), np.empty_like(x)
        one, other = x.copy(), x.copy()
        ops.add_rms_norm(one, delta, weight, 1e-5, ours)
        oracle.add_rms_norm(other, delta, weight, 1e-5, theirs)
        assert np.array_equal(one, other)
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6)
        single = np.empty((1, hidden), np.float32)
        ops.rms_norm(one[3:4], weight, 1e-5, single)
        assert np.array_equal(single[0], ours[3])


def test_silu_mul_over_the_whole_range_and_in_the_remainder() -> None:
    gate = np.concatenate([np.linspace(-120, 120, 1003), [0.0, -0.0, 1e-30, -1e30, 1e30]]).astype(np.float32)[None]
    up = np.full_like(gate, 1.5)
    expected = (gate.astype(np.float64) / (1 + np.exp(-np.clip(gate.astype(np.float64), -700, None))) * 1.5)[0]
    ours = gate.copy()
    NumbaOps().silu_mul(ours, up)
    np.testing.assert_allclose(ours[0], expected, rtol=1e-6, atol=1e-35)
    for column in (0, 500, 1002):
        alone = gate[:, column : column + 1].copy()
        NumbaOps().silu_mul(alone, up[:, :1].copy())
        assert alone[0, 0] == ours[0, column]


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed_rotate_and_append_agree_with_torch(dtype: str) -> None:
    ours, oracle = NumbaOps(), TorchOps()
    table, tokens = stored(random(11, 24), dtype), np.array([3, 10, 3], np.int64)
    embedded, expected = np.empty((2, 3, 24), np.float32)
    ours.embed(table, tokens, embedded)
    oracle.embed(table, tokens, expected)
    assert np.array_equal(embedded, expected)
    one = random(3, 2, 16)
    other = one.copy()
    plan = plan_for([(2, 3)], page_size=4)
    rotation = Rotation(random(9, 8), random(9, 8, seed=1))
    ours.rotate(one, rotation, plan)
    oracle.rotate(other, rotation, plan)
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    first = np.zeros((5, 2, 2, 4, 16), np.float32 if dtype == "fp32" else np.uint16)
    second = first.copy()
    ours.append(one, -one, first, plan)
    oracle.append(one, -one, second, plan)
    assert np.array_equal(first, second)


def test_bf16_rounds_to_nearest_even_and_keeps_nan_and_infinity() -> None:
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x80000000], np.uint32
    )
    values = np.resize(bits.view(np.float32), (1, 1, 16))
    block = np.zeros((1, 2, 1, 4, 16), np.uint16)
    NumbaOps().append(values, values, block, plan_for([(0, 1)], page_size=4, shuffle=False))
    expected = [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7F80, 0xFF80, 0x7FC0, 0x8000]
    assert block[0, 0, 0, 0, :8].tolist() == expected
    assert convert(values, "bf16")[0, 0, :8].tolist() == expected


# ------------------------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int


SHAPES = [Shape(9, 3, 64, 32), Shape(4, 4, 16, 8), Shape(8, 2, 48, 16), Shape(8, 1, 128, 128)]


def plan_for(sequences: list[tuple[int, int]], page_size: int, shuffle: bool = True) -> RowPlan:
    """`sequences` are (first position, rows); pages are taken in a random order out of twice as many."""
    pages_of = [-(-(first + rows) // page_size) for first, rows in sequences]
    order = np.arange(2 * sum(pages_of))
    if shuffle:
        np.random.default_rng(7).shuffle(order)
    table = np.zeros((len(sequences), max(pages_of)), np.int64)
    taken = 0
    for index, count in enumerate(pages_of):
        table[index, :count] = order[taken : taken + count]
        taken += count
    position = np.concatenate([np.arange(first, first + rows) for first, rows in sequences])
    sequence = np.repeat(np.arange(len(sequences)), [rows for _, rows in sequences])
    return RowPlan(
        row_start=np.cumsum([0] + [rows for _, rows in sequences]).astype(np.int64),
        first_position=np.array([first for first, _ in sequences], np.int64),
        page_table=table,
        position=position.astype(np.int64),
        page=table[sequence, position // page_size],
        slot=(position % page_size).astype(np.int64),
    )


def filled_block(plan: RowPlan, shape: Shape, dtype: str, pages: int) -> NDArray:
    """Random keys and values where a sequence has tokens, NaN everywhere else."""
    block = np.full((pages, 2, shape.kv_heads, shape.page_size, shape.head_dim), np.nan, np.float32)
    for index, first in enumerate(plan.first_position):
        length = int(first + plan.row_start[index + 1] - plan.row_start[index])
        for position in range(length):
            page, slot = plan.page_table[index, position // shape.page_size], position % shape.page_size
            block[page, :, :, slot] = random(2, shape.kv_heads, shape.head_dim, seed=1000 * index + position)
    return convert(block, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_agrees_with_torch_and_never_reads_stale_memory(shape: Shape, dtype: str) -> None:
    page = shape.page_size
    sequences = [(0, 1), (0, page), (page - 1, 1), (page, 2 * page + 3), (3, 2), (4 * page + 5, 1), (0, 77)]
    plan = plan_for(sequences, page)
    block = filled_block(plan, shape, dtype, pages=2 * int(plan.page_table.size))
    queries = random(int(plan.row_start[-1]), shape.heads, shape.head_dim, seed=5)
    ours, theirs = np.full((2, *queries.shape), np.nan, np.float32)
    NumbaOps().attention(queries, block, plan, ours)
    TorchOps().attention(queries, block, plan, theirs)
    assert np.isfinite(ours).all()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_attention_row_is_the_same_alone_in_a_chunk_and_in_a_batch(shape: Shape, dtype: str) -> None:
    ops, page, rows = NumbaOps(), shape.page_size, 2 * shape.page_size + 37
    whole = plan_for([(0, rows)], page)
    block = filled_block(whole, shape, dtype, pages=2 * int(whole.page_table.size))
    queries = random(rows, shape.heads, shape.head_dim, seed=5)
    together = np.empty_like(queries)
    ops.attention(queries, block, whole, together)
    for first, last in ((0, 1), (page - 1, page), (page, page + 5), (17, rows), (rows - 1, rows)):
        part = cut(whole, first, last)
        out = np.empty((last - first, *queries.shape[1:]), np.float32)
        ops.attention(np.ascontiguousarray(queries[first:last]), block, part, out)
        assert np.array_equal(out.view(np.uint32), together[first:last].view(np.uint32)), (first, last)


def cut(plan: RowPlan, first: int, last: int) -> RowPlan:
    """The same sequence with rows `first:last` alone, after what comes before them is in the cache."""
    return RowPlan(
        np.array([0, last - first], np.int64),
        np.array([first], np.int64),
        plan.page_table,
        plan.position[first:last],
        plan.page[first:last],
        plan.slot[first:last],
    )
