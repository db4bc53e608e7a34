"""The operations by torch: the oracle of the kernel tests, and a fallback. Slow at decode: it gathers pages."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
import torch.nn.functional as F

from pdserve.ops.api import Floats, Indices, Rotation, RowPlan, Weights


def as_tensor(array: Weights) -> torch.Tensor:
    """A tensor over the same memory; uint16 is taken for bf16."""
    if array.dtype == np.uint16:
        return _over(array.view(np.int16)).view(torch.bfloat16)
    return _over(array)


def _over(array: Weights) -> torch.Tensor:
    if array.flags.writeable:
        return torch.from_numpy(array)
    # Mapped weights are read-only, which torch warns of. The tensor does not keep the mapping alive; it lives for one
    # operation, and nothing here writes into weights.
    memory = (ctypes.c_byte * array.nbytes).from_address(array.ctypes.data)
    return torch.frombuffer(memory, dtype=_TORCH_DTYPES[array.dtype.type]).view(array.shape)


_TORCH_DTYPES = {np.int16: torch.int16, np.float32: torch.float32, np.int64: torch.int64}


class TorchOps:
    """`native_bf16` multiplies bf16 weights as they are, rounding activations; otherwise weights widen every time."""

    def __init__(self, *, native_bf16: bool = False) -> None:
        self._native_bf16 = native_bf16

    @property
    def name(self) -> str:
        return "torch-bf16" if self._native_bf16 else "torch"

    @property
    def deterministic(self) -> bool:
        return False

    def embed(self, table: Weights, tokens: Indices, out: Floats) -> None:
        as_tensor(out).copy_(as_tensor(np.ascontiguousarray(table[tokens])).float())

    def linear(self, x: Floats, weight: Weights, out: Floats) -> None:
        rows, weights = as_tensor(x), as_tensor(weight)
        if weights.dtype == torch.bfloat16 and self._native_bf16:
            rows = rows.bfloat16()
        elif weights.dtype == torch.bfloat16:
            weights = weights.float()
        as_tensor(out).copy_(F.linear(rows, weights))

    def rms_norm(self, x: Floats, weight: Floats, epsilon: float, out: Floats) -> None:
        rows = as_tensor(x)
        scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon)
        as_tensor(out).copy_(rows * scale * as_tensor(weight))

    def add_rms_norm(self, residual: Floats, delta: Floats, weight: Floats, epsilon: float, out: Floats) -> None:
        residual += delta
        self.rms_norm(residual, weight, epsilon, out)

    def rotate(self, x: Floats, rotation: Rotation, plan: RowPlan) -> None:
        half = x.shape[2] // 2
        cos = rotation.cos[plan.position][:, None, :]
        sin = rotation.sin[plan.position][:, None, :]
        first, second = x[:, :, :half].copy(), x[:, :, half:].copy()
        x[:, :, :half] = first * cos - second * sin
        x[:, :, half:] = second * cos + first * sin

    def append(self, keys: Floats, values: Floats, block: Weights, plan: RowPlan) -> None:
        stored = as_tensor(block)
        page, slot = as_tensor(plan.page), as_tensor(plan.slot)
        stored[page, 0, :, slot] = as_tensor(keys).to(stored.dtype)
        stored[page, 1, :, slot] = as_tensor(values).to(stored.dtype)

    def attention(self, queries: Floats, block: Weights, plan: RowPlan, out: Floats) -> None:
        for sequence in range(len(plan.first_position)):
            rows = slice(int(plan.row_start[sequence]), int(plan.row_start[sequence + 1]))
            first = int(plan.first_position[sequence])
            out[rows] = _attend(queries[rows], first, block, plan.page_table[sequence])

    def silu_mul(self, gate: Floats, up: Floats) -> None:
        tensor = as_tensor(gate)
        tensor.copy_(F.silu(tensor) * as_tensor(up))


def _attend(queries: Floats, first: int, block: Weights, pages: Indices) -> Floats:
    """Attention of one sequence's rows, from gathered pages."""
    rows, _, dim = queries.shape
    length, page_size = first + rows, block.shape[3]
    gathered = as_tensor(block[pages[: -(-length // page_size)]]).float()  # (pages, 2, kv_heads, page, dim)
    keys, values = gathered.permute(1, 2, 0, 3, 4).reshape(2, block.shape[2], -1, dim)[:, :, :length]
    allowed = torch.arange(length)[None, :] <= (first + torch.arange(rows))[:, None]
    attended = F.scaled_dot_product_attention(
        as_tensor(queries).transpose(0, 1)[None], keys[None], values[None], attn_mask=allowed, enable_gqa=True
    )
    result: Floats = attended[0].transpose(0, 1).contiguous().numpy()
    return result
