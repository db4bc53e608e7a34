from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pdserve.kv.memory import KvMemory
from policies.layout import KvLayout, PageGeometry

GEOMETRY = PageGeometry(layers=2, kv_heads=3, head_dim=4, page_size=8, element_bytes=4, pages=5)


def test_blocks_lie_where_the_geometry_says() -> None:
    with KvMemory(GEOMETRY) as memory:
        for layer, page in ((0, 0), (0, 4), (1, 0), (1, 3)):
            block = memory.blocks[layer, page]
            assert block.ctypes.data - memory.address == GEOMETRY.offset(layer, page)
            assert block.nbytes == GEOMETRY.block_bytes and block.flags.c_contiguous


def test_the_descriptor_maps_the_same_bytes() -> None:
    with KvMemory(replace(GEOMETRY, element_bytes=2)) as memory:
        assert memory.blocks.dtype == np.uint16
        memory.blocks[1, 3] = 7
        again = mmap.mmap(os.dup(memory.fd), memory.geometry.region_bytes)
        offset = memory.geometry.offset(1, 3)
        assert again[offset : offset + memory.geometry.block_bytes] == b"\x07\x00" * (memory.geometry.block_bytes // 2)
        again.close()


def test_close_gives_the_memory_back() -> None:
    memory = KvMemory(GEOMETRY)
    fd = memory.fd
    memory.close()
    memory.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    assert "pdserve-kv" not in Path("/proc/self/maps").read_text()


def test_a_view_outlives_close() -> None:
    """A kernel that still runs must not crash the process."""
    memory = KvMemory(GEOMETRY)
    view = memory.blocks[1]
    memory.close()
    view.fill(3)
    assert view.sum() == 3 * view.size


def test_blocks_are_in_the_layout_s_order_and_layers_always_heads_first() -> None:
    g = GEOMETRY
    with KvMemory(replace(g, layout=KvLayout.NHD)) as memory:
        assert memory.blocks.shape[2:] == (2, g.page_size, g.kv_heads, g.head_dim)
        memory.layer(1)[2, 1, 0, 3] = 5
        assert (memory.blocks[1, 2, 1, 3, 0] == 5).all()
    with KvMemory(replace(g, kv_heads=None)) as latents:
        assert latents.layer(0).shape == (g.pages, g.page_size, g.head_dim)
