"""The worked cases: the right-hand numbers are exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.layout import KvLayout, PageGeometry
from policies.sharding import (
    LayerGroup,
    ParallelLayout,
    ShardingError,
    expected_count,
    heads_per_rank,
    pages_sent,
    writes_per_destination_rank,
)

QWEN = LayerGroup(layers=62, kv_heads=8)
R1 = LayerGroup(layers=61, kv_heads=None)
HND, NHD = KvLayout.HND, KvLayout.NHD


@pytest.mark.parametrize(
    ("group", "prefill", "decode", "present", "writes"),
    [
        (QWEN, ParallelLayout(8), ParallelLayout(8), 0, 3_968),
        (QWEN, ParallelLayout(8), ParallelLayout(4), 0, 15_872),
        (QWEN, ParallelLayout(4), ParallelLayout(8), 0, 7_936),
        (QWEN, ParallelLayout(4, NHD), ParallelLayout(8, NHD), 0, 507_904),
        (QWEN, ParallelLayout(16), ParallelLayout(16), 0, 3_968),
        (R1, ParallelLayout(8), ParallelLayout(8), 0, 3_904),
        (R1, ParallelLayout(8), ParallelLayout(1), 0, 3_904),
        (QWEN, ParallelLayout(8), ParallelLayout(8), 10, 3_348),
        (QWEN, ParallelLayout(16), ParallelLayout(8), 0, 3_968),
    ],
)
def test_worked_cases_at_4097_tokens_and_64_token_pages(
    group: LayerGroup, prefill: ParallelLayout, decode: ParallelLayout, present: int, writes: int
) -> None:
    pages = pages_sent(4_096, 64, present)
    assert writes_per_destination_rank([(group, pages)], prefill, decode, 64) == writes
    assert expected_count([(group, pages)], prefill, decode, 64) == writes * decode.tp


def test_a_drafter_group_and_the_tail_are_counted() -> None:
    drafter = LayerGroup(layers=1, kv_heads=None)
    groups = [(R1, pages_sent(4_097, 64)), (drafter, pages_sent(4_096, 64))]
    assert expected_count(groups, ParallelLayout(8), ParallelLayout(1), 64, tail=True) == 4_030


def test_one_token_prompt_needs_no_write() -> None:
    assert expected_count([(QWEN, pages_sent(0, 64))], ParallelLayout(8), ParallelLayout(8), 64) == 0


def test_heads_that_do_not_divide_are_refused_with_the_numbers() -> None:
    assert heads_per_rank(3, 3) == 1
    with pytest.raises(ShardingError, match="3 KV heads cannot be shared by 2 ranks"):
        heads_per_rank(3, 2)


def test_different_kv_layouts_are_refused() -> None:
    with pytest.raises(ShardingError, match="KV layouts differ: hnd at prefill, nhd at decode"):
        expected_count([(QWEN, 1)], ParallelLayout(1, HND), ParallelLayout(1, NHD), 64)


@given(
    layers=st.integers(1, 8),
    pages=st.integers(1, 50),
    heads=st.integers(1, 8),
    layer=st.integers(0, 7),
    page=st.integers(0, 49),
)
def test_blocks_tile_the_region(layers: int, pages: int, heads: int, layer: int, page: int) -> None:
    geometry = PageGeometry(layers, heads, head_dim=64, page_size=16, element_bytes=2, pages=pages)
    layer, page = layer % layers, page % pages
    assert geometry.offset(layer, page) == (layer * pages + page) * geometry.block_bytes
    assert geometry.offset(layers - 1, pages - 1) + geometry.block_bytes == geometry.region_bytes
