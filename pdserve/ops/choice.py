"""Which implementation of the operations a process uses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pdserve.errors import ModelError
from pdserve.ops.api import COMMON, Needs, Ops

_log = logging.getLogger(__name__)
_NATIVE_BF16_FLAGS = ("avx512_bf16", "amx_bf16")


def choose_ops(
    dtype: str,
    deterministic: bool,
    head_dim: int,
    report: Callable[[str], None] | None = None,
    needs: Needs = COMMON,
) -> Ops:
    """The kernels, unless determinism was waived and torch multiplies this CPU's native bf16 faster; compiled.

    The choice is reported in one line. Raises ModelError where only torch can serve head_dim but rows must not depend
    on their batch.
    """
    say = report or _log.info
    if head_dim % 16:
        if deterministic:
            raise ModelError(f"head_dim {head_dim} is not a multiple of 16; only engine.deterministic: false serves it")
        return _torch(say, native_bf16=False, why=f"head_dim {head_dim} is not a multiple of 16")
    from pdserve.ops.numba_ops import NumbaOps, warm_up

    warm_up(dtype, say, needs)
    kernels = NumbaOps()
    if deterministic or dtype != "bf16" or not native_bf16():
        say(f"kernels: numba ({'deterministic' if deterministic else 'no native bf16 on this CPU'})")
        return kernels
    return _faster(kernels, say)


def native_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has instructions that multiply bf16."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return any(flag in flags for flag in _NATIVE_BF16_FLAGS)


def _faster(kernels: Ops, say: Callable[[str], None]) -> Ops:
    """Whichever is faster at a prefill chunk's linear; torch falls short at decode, so it must win clearly."""
    from pdserve.ops.torch_ops import TorchOps

    torch_ops = TorchOps(native_bf16=True)
    ours, theirs = _linear_seconds(kernels), _linear_seconds(torch_ops)
    chosen: Ops = torch_ops if theirs < 0.6 * ours else kernels
    say(f"kernels: {chosen.name} (512 x 1024 x 1024 in bf16: numba {ours * 1e3:.1f} ms, torch {theirs * 1e3:.1f} ms)")
    return chosen


def _linear_seconds(ops: Ops) -> float:
    x, out = np.ones((512, 1024), np.float32), np.empty((512, 1024), np.float32)
    weight = np.full((1024, 1024), 0x3F80, np.uint16)  # ones
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        ops.linear(x, weight, out)
        best = min(best, time.perf_counter() - started)
    return best


def _torch(say: Callable[[str], None], *, native_bf16: bool, why: str) -> Ops:
    from pdserve.ops.torch_ops import TorchOps

    ops = TorchOps(native_bf16=native_bf16)
    say(f"kernels: {ops.name} ({why})")
    return ops
