"""A rank's KV memory: one file descriptor, one mapping, one region per layer group."""

from __future__ import annotations

import mmap
import os
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from policies.layout import KvLayout, PageGeometry

_DTYPES: dict[int, type[np.generic]] = {2: np.uint16, 4: np.float32}


class KvMemory:
    """The pages of one rank, laid over a memfd.

    `blocks` is `(layers, pages, *block)`: float32, or bf16 seen as uint16. A block is `(2, kv_heads, page_size,
    head_dim)` for HND, `(2, page_size, kv_heads, head_dim)` for NHD, `(page_size, head_dim)` for a latent (MLA).
    The descriptor `fd` can be passed to another process, which maps the same bytes: with `fd` it is such a mapping,
    and owns the descriptor.
    """

    def __init__(self, geometry: PageGeometry, fd: int | None = None) -> None:
        """Raises ValueError where the descriptor's memory has not the geometry's size."""
        self.geometry = geometry
        if fd is None:
            fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC)
            os.ftruncate(fd, geometry.region_bytes)
        elif (there := os.fstat(fd).st_size) != geometry.region_bytes:
            raise ValueError(f"the memory has {there} bytes, {geometry} needs {geometry.region_bytes}")
        self.fd = fd
        mapping = mmap.mmap(self.fd, geometry.region_bytes)  # kept by the array over it
        g = geometry
        self.blocks: NDArray[Any] = np.frombuffer(mapping, dtype=_DTYPES[g.element_bytes]).reshape(
            g.layers, g.pages, *g.block_shape
        )

    def layer(self, index: int) -> NDArray[Any]:
        """One layer as kernels take it: `(pages, 2, kv_heads, page_size, head_dim)` whatever the order in memory,
        `(pages, page_size, head_dim)` of a latent.
        """
        block: NDArray[Any] = self.blocks[index]
        if self.geometry.kv_heads is not None and self.geometry.layout is KvLayout.NHD:
            return block.swapaxes(2, 3)
        return block

    @property
    def address(self) -> int:
        """Where the mapping starts in this process."""
        return int(self.blocks.ctypes.data)

    def close(self) -> None:
        """Lets go of the memory; it is unmapped once the last view of `blocks` taken elsewhere is gone. Idempotent."""
        if self.fd < 0:
            return
        self.blocks = np.empty(0, dtype=self.blocks.dtype)
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
