"""Which implementation of the operations a process uses."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.ops.api import Ops


def choose_ops(dtype: str, deterministic: bool, head_dim: int, report: Callable[[str], None]) -> Ops:
    from pdserve.ops.numba_ops import NumbaOps, warm_up

    warm_up(dtype, report)
    return NumbaOps()
