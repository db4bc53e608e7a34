"""Blocks, and the byte ranges of a head range, compared with what numpy says of the same array."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policies.layout import BlockShape, HeadRange, KvLayout, PageGeometry

HND, NHD = KvLayout.HND, KvLayout.NHD

blocks = st.builds(
    BlockShape,
    kv_heads=st.integers(1, 6),
    head_dim=st.integers(1, 4),
    page_size=st.integers(1, 5),
    element_bytes=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(KvLayout),
)


def test_the_blocks_of_the_two_reference_models() -> None:
    assert BlockShape(1, 128, 64, 2).block_bytes == 32 << 10
    assert BlockShape(None, 576, 64, 2).block_bytes == 72 << 10
    assert BlockShape(4, 128, 64, 2, HND).shape == (2, 4, 64, 128)
    assert BlockShape(4, 128, 64, 2, NHD).shape == (2, 64, 4, 128)
    assert BlockShape(None, 576, 64, 2).shape == (64, 576)


@given(blocks)
def test_a_shape_has_the_bytes_that_its_block_takes(block: BlockShape) -> None:
    assert np.prod(block.shape) * block.element_bytes == block.block_bytes == block.whole.block_bytes


@given(blocks, st.integers(0, 5), st.integers(1, 6))
def test_segments_are_the_bytes_of_their_heads_in_order_of_address(block: BlockShape, first: int, count: int) -> None:
    assert block.kv_heads is not None
    first %= block.kv_heads
    count = min(count, block.kv_heads - first)
    element = np.arange(np.prod(block.shape)).reshape(block.shape)
    axis = 1 if block.layout is HND else 2
    chosen = np.take(element, range(first, first + count), axis=axis).reshape(-1)
    wanted = (chosen[:, None] * block.element_bytes + np.arange(block.element_bytes)).reshape(-1)

    segments = block.segments(HeadRange(first, count))
    starts = segments.offset_bytes + segments.stride_bytes * np.arange(segments.count)
    assert segments.block_bytes == block.block_bytes, "the strides tile the block"
    assert np.array_equal((starts[:, None] + np.arange(segments.length_bytes)).reshape(-1), wanted)
    assert segments.count == (2 if block.layout is HND else 2 * block.page_size)


@given(blocks, st.lists(st.integers(0, 99), max_size=8))
def test_the_index_of_pages_names_every_segment_of_each(block: BlockShape, pages: list[int]) -> None:
    assert block.kv_heads is not None
    segments = block.segments(HeadRange(0, block.kv_heads))
    index = segments.index(np.array(pages, dtype=np.int64))
    starts = segments.offset_bytes + segments.stride_bytes * index
    wanted = [page * block.block_bytes + k * segments.stride_bytes for page in pages for k in range(segments.count)]
    assert starts.tolist() == wanted
    assert block.whole.index(np.array(pages, dtype=np.int64)).tolist() == pages


@given(
    layers=st.integers(1, 8),
    pages=st.integers(1, 50),
    heads=st.none() | st.integers(1, 8),
    layer=st.integers(0, 7),
    page=st.integers(0, 49),
)
def test_blocks_tile_the_region(layers: int, pages: int, heads: int | None, layer: int, page: int) -> None:
    geometry = PageGeometry(layers, heads, head_dim=64, page_size=16, element_bytes=2, pages=pages)
    layer, page = layer % layers, page % pages
    assert geometry.offset(layer, page) == (layer * pages + page) * geometry.block_bytes
    assert geometry.offset(layers - 1, pages - 1) + geometry.block_bytes == geometry.region_bytes
    assert geometry.block_bytes == geometry.block.block_bytes and geometry.block_shape == geometry.block.shape
