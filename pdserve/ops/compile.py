"""Compiling kernels: one decorator, whose cache notices edits of any file of this room.

Numba's own cache looks at the file of the decorated function alone, so an edit in an imported intrinsic would go
unnoticed. Here the cache folder carries a digest of all of the room's sources.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import config as numba_config

from pdserve.paths import cache_dir

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def _cache_folder() -> Path:
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return cache_dir() / "kernels" / digest.hexdigest()[:16]


def kernel(function: Kernel) -> Kernel:
    """Compiles without fast-math (LLVM may not reorder a sum), without the GIL, cached in the user's directory."""
    before = numba_config.CACHE_DIR
    numba_config.CACHE_DIR = str(_FOLDER)  # read when the dispatcher is made, that is, below
    try:
        return cast(Kernel, numba.njit(nogil=True, cache=True, error_model="numpy")(function))
    finally:
        numba_config.CACHE_DIR = before


def inline(function: Callable[..., Any]) -> Any:
    """A function for use inside kernels; compiled into them, and for their addresses and tuples left untyped."""
    return numba.njit(nogil=True, error_model="numpy")(function)


_FOLDER = _cache_folder()
