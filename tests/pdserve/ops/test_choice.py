"""Which kernels a process takes, and that it says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import ModelError
from pdserve.ops import choice
from pdserve.ops.choice import choose_ops, native_bf16


def test_deterministic_takes_the_kernels_and_says_so_in_one_line() -> None:
    said: list[str] = []
    ops = choose_ops("bf16", True, 64, said.append)
    assert ops.deterministic and ops.name == "numba"
    assert said[-1] == "kernels: numba (deterministic)"


def test_a_head_dim_without_kernels_needs_determinism_waived() -> None:
    with pytest.raises(ModelError, match="head_dim 24 is not a multiple of 16"):
        choose_ops("fp32", True, 24)
    assert choose_ops("fp32", False, 24).name == "torch"


def test_native_bf16_is_read_from_the_cpu_s_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags : fpu avx2 avx512_bf16\n")
    assert native_bf16(cpuinfo)
    cpuinfo.write_text("processor : 0\nflags : fpu avx2 fma\n")
    assert not native_bf16(cpuinfo)
    assert not native_bf16(tmp_path / "missing")


def test_with_native_bf16_a_measurement_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "native_bf16", lambda: True)
    said: list[str] = []
    ops = choose_ops("bf16", False, 64, said.append)
    assert ops.name in ("numba", "torch-bf16")
    assert "numba" in said[-1] and "torch" in said[-1] and "ms" in said[-1]
