"""How payload moves inside one process: a compiled loop that holds no GIL, or ctypes where numba is missing."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

from numpy.typing import NDArray

copy_bytes: Any = ctypes.memmove

CopyBlocks = Callable[..., int]


def copy_blocks(
    block_bytes: int,
    source: int,
    source_stride: int,
    source_index: NDArray[Any],
    target: int,
    target_stride: int,
    target_index: NDArray[Any],
    first: int,
    end: int,
) -> int:
    """Copies blocks between addresses until one would leave `first:end`; returns how many were copied."""
    for n in range(len(source_index)):
        to = target + target_stride * target_index[n]
        if to < first or to + block_bytes > end:
            return n
        if block_bytes > 0:
            copy_bytes(to, source + source_stride * source_index[n], block_bytes)
    return len(source_index)


def _interpreted(*arguments: Any) -> int:
    """ctypes takes no numpy integers."""
    block, source, s_stride, s_index, target, t_stride, t_index, first, end = arguments
    lists = s_index.tolist(), t_index.tolist()
    return copy_blocks(block, source, s_stride, lists[0], target, t_stride, lists[1], first, end)


@cache
def bind_copy() -> CopyBlocks:
    """Compiled where numba is installed."""
    return _interpreted if importlib.util.find_spec("numba") is None else _compiled()


def _compiled() -> CopyBlocks:
    from types import FunctionType

    import numba
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    @intrinsic  # type: ignore[untyped-decorator]
    def copy(typing: Any, to: Any, source: Any, length: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointers = [builder.inttoptr(a, cgutils.voidptr_t) for a in arguments[:2]]
            cgutils.raw_memcpy(builder, *pointers, arguments[2], 1)
            return context.get_constant(types.int64, 0)

        return types.int64(types.int64, types.int64, types.int64), generate

    bound = FunctionType(copy_blocks.__code__, {**globals(), "copy_bytes": copy}, copy_blocks.__name__)
    bound.__module__, bound.__qualname__ = __name__, copy_blocks.__qualname__
    i64, array = numba.int64, numba.int64[::1]
    signature = i64(i64, i64, i64, array, i64, i64, array, i64, i64)
    compiled: CopyBlocks = numba.njit(signature, nogil=True, cache=True)(bound)
    return compiled
