"""Latent attention and the routing of experts: against torch, and row by row whatever the company."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pdserve.models.safetensors_file import convert
from pdserve.ops.api import Rotation, Routing, RowPlan
from pdserve.ops.numba_ops import NumbaOps
from pdserve.ops.torch_ops import TorchOps
from tests.pdserve.ops.test_numba_ops import DTYPES, cut, plan_for, random, stored

SHAPES = [(4, 32, 16, 8), (3, 16, 16, 16), (16, 512, 64, 64)]  # heads, rank, rope, page size


def filled(plan: RowPlan, width: int, page_size: int, dtype: str) -> NDArray:
    """Random latents where a sequence has tokens, NaN everywhere else."""
    block = np.full((2 * int(plan.page_table.size), page_size, width), np.nan, np.float32)
    for index, first in enumerate(plan.first_position):
        for position in range(int(first + plan.row_start[index + 1] - plan.row_start[index])):
            page = plan.page_table[index, position // page_size]
            block[page, position % page_size] = random(width, seed=1000 * index + position)
    return convert(block, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_latent_attention_agrees_with_torch_and_never_reads_stale_memory(
    shape: tuple[int, int, int, int], dtype: str
) -> None:
    heads, rank, rope, page = shape
    plan = plan_for([(0, 1), (0, page), (page - 1, 1), (page, page + 3), (3 * page + 5, 1)], page)
    block = filled(plan, rank + rope, page, dtype)
    queries = random(int(plan.row_start[-1]), heads, rank + rope, seed=5)
    ours, theirs = np.full((2, len(queries), heads, rank), np.nan, np.float32)
    NumbaOps().latent_attention(queries, block, plan, 0.05, ours)
    TorchOps().latent_attention(queries, block, plan, 0.05, theirs)
    assert np.isfinite(ours).all()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [4, 128])
def test_a_latent_row_is_the_same_alone_and_in_a_chunk(heads: int, dtype: str) -> None:
    ops, page, rows, rank = NumbaOps(), 8, 43, 32
    whole = plan_for([(0, rows)], page)
    block = filled(whole, rank + 16, page, dtype)
    queries, together = random(rows, heads, rank + 16, seed=5), np.empty((rows, heads, rank), np.float32)
    ops.latent_attention(queries, block, whole, 0.1, together)
    for first, last in ((0, 1), (page - 1, page), (page, page + 5), (17, rows)):
        out = np.empty((last - first, heads, rank), np.float32)
        ops.latent_attention(np.ascontiguousarray(queries[first:last]), block, cut(whole, first, last), 0.1, out)
        assert np.array_equal(out.view(np.uint32), together[first:last].view(np.uint32)), (first, last)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "nope", "rope", "value", "rank"), [(3, 24, 16, 20, 32), (4, 128, 64, 128, 512)])
def test_absorb_and_expand_agree_with_torch_row_by_row(
    heads: int, nope: int, rope: int, value: int, rank: int, dtype: str
) -> None:
    ops, oracle, rows = NumbaOps(), TorchOps(), 11
    weight = stored(random(heads, nope + value, rank), dtype)
    queries, latents = random(rows, heads, nope + rope, seed=1), random(rows, heads, rank, seed=2)
    absorbed, expected = np.empty((2, rows, heads, rank + rope), np.float32)
    ops.absorb(queries, weight, nope, absorbed)
    oracle.absorb(queries, weight, nope, expected)
    np.testing.assert_allclose(absorbed, expected, rtol=0, atol=1e-4)
    expanded, wanted = np.empty((2, rows, heads, value), np.float32)
    ops.expand(latents, weight, nope, expanded)
    oracle.expand(latents, weight, nope, wanted)
    np.testing.assert_allclose(expanded, wanted, rtol=0, atol=2e-4)
    for first, last in ((0, 1), (2, 6), (10, 11)):
        one = np.empty((last - first, heads, rank + rope), np.float32)
        other = np.empty((last - first, heads, value), np.float32)
        ops.absorb(queries[first:last], weight, nope, one)
        ops.expand(latents[first:last], weight, nope, other)
        assert np.array_equal(one, absorbed[first:last]) and np.array_equal(other, expanded[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_are_appended_and_the_end_of_a_head_is_rotated(dtype: str) -> None:
    ours, oracle, plan = NumbaOps(), TorchOps(), plan_for([(2, 3)], page_size=4)
    for interleaved in (False, True):
        rotation = Rotation(random(9, 8), random(9, 8, seed=1), interleaved)
        one = random(3, 2, 40)
        other = one.copy()
        ours.rotate(one, rotation, plan)
        oracle.rotate(other, rotation, plan)
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
        assert np.array_equal(one[:, :, :24], random(3, 2, 40)[:, :, :24])
    first = np.zeros((5, 4, 48), np.float32 if dtype == "fp32" else np.uint16)
    second = first.copy()
    ours.append_latent(random(3, 48), first, plan)
    oracle.append_latent(random(3, 48), second, plan)
    assert np.array_equal(first, second) and np.count_nonzero(first.any(axis=2)) == 3


ROUTINGS = [
    Routing(3),
    Routing(2, normalise=False, scale=0.5),
    Routing(4, sigmoid=True, groups=4, kept_groups=2, scale=2.5),
    Routing(1, sigmoid=True, groups=4, kept_groups=1),
]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("biased", [False, True])
def test_routing_agrees_with_torch_row_by_row(routing: Routing, biased: bool) -> None:
    logits, bias = random(50, 16) * 3, random(16, seed=1) if biased else np.empty(0, np.float32)
    results = []
    for ops in (NumbaOps(), TorchOps()):
        experts, weights = np.empty((50, routing.top_k), np.int64), np.empty((50, routing.top_k), np.float32)
        ops.route(logits, bias, routing, experts, weights)
        results.append((experts, weights))
    (ours, our_weights), (theirs, their_weights) = results
    assert np.array_equal(ours, theirs)
    np.testing.assert_allclose(our_weights, their_weights, rtol=1e-5)
    one, weight = np.empty((1, routing.top_k), np.int64), np.empty((1, routing.top_k), np.float32)
    NumbaOps().route(logits[31:32], bias, routing, one, weight)
    assert np.array_equal(one[0], ours[31]) and np.array_equal(weight[0], our_weights[31])


def test_equal_scores_choose_the_first_experts() -> None:
    experts, weights = np.empty((1, 2), np.int64), np.empty((1, 2), np.float32)
    NumbaOps().route(np.zeros((1, 5), np.float32), np.empty(0, np.float32), Routing(2), experts, weights)
    assert experts.tolist() == [[0, 1]] and weights.tolist() == [[0.5, 0.5]]


def test_combine_sums_a_row_s_results_in_order() -> None:
    results, weights = random(12, 40), random(4, 3, seed=1)
    place = np.random.default_rng(2).permutation(12).reshape(4, 3)
    ours, theirs = np.empty((2, 4, 40), np.float32)
    NumbaOps().combine(results, place, weights, ours)
    TorchOps().combine(results, place, weights, theirs)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
