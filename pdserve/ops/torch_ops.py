"""The operations by torch: the oracle of the kernel tests, and a fallback. Slow at decode: it gathers pages."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
import torch.nn.functional as F

from pdserve.ops.api import Floats, Indices, Rotation, Routing, RowPlan, Weights


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
        half = rotation.cos.shape[1]
        turned = x[:, :, x.shape[2] - 2 * half :]
        split = (slice(0, None, 2), slice(1, None, 2)) if rotation.interleaved else (slice(0, half), slice(half, None))
        cos = rotation.cos[plan.position][:, None, :]
        sin = rotation.sin[plan.position][:, None, :]
        first, second = turned[:, :, split[0]].copy(), turned[:, :, split[1]].copy()
        turned[:, :, split[0]] = first * cos - second * sin
        turned[:, :, split[1]] = second * cos + first * sin

    def append(self, keys: Floats, values: Floats, block: Weights, plan: RowPlan) -> None:
        stored = as_tensor(block)
        page, slot = as_tensor(plan.page), as_tensor(plan.slot)
        stored[page, 0, :, slot] = as_tensor(keys).to(stored.dtype)
        stored[page, 1, :, slot] = as_tensor(values).to(stored.dtype)

    def append_latent(self, latents: Floats, block: Weights, plan: RowPlan) -> None:
        stored = as_tensor(block)
        stored[as_tensor(plan.page), as_tensor(plan.slot)] = as_tensor(latents).to(stored.dtype)

    def attention(self, queries: Floats, block: Weights, plan: RowPlan, out: Floats) -> None:
        for sequence in range(len(plan.first_position)):
            rows = slice(int(plan.row_start[sequence]), int(plan.row_start[sequence + 1]))
            first = int(plan.first_position[sequence])
            out[rows] = _attend(queries[rows], first, block, plan.page_table[sequence])

    def latent_attention(self, queries: Floats, block: Weights, plan: RowPlan, scale: float, out: Floats) -> None:
        for sequence in range(len(plan.first_position)):
            rows = slice(int(plan.row_start[sequence]), int(plan.row_start[sequence + 1]))
            pages = plan.page_table[sequence, : -(-int(plan.first_position[sequence] + rows.stop - rows.start)
                                                  // block.shape[1])]  # fmt: skip
            latents = as_tensor(block[pages]).float().flatten(0, 1)
            out[rows] = _attend_latents(queries[rows], int(plan.first_position[sequence]), latents, scale, out.shape[2])

    def absorb(self, queries: Floats, weight: Weights, nope: int, out: Floats) -> None:
        made, rank = as_tensor(weight).float(), weight.shape[2]
        as_tensor(out)[:, :, :rank] = torch.einsum("rhd,hdk->rhk", as_tensor(queries)[:, :, :nope], made[:, :nope])
        out[:, :, rank:] = queries[:, :, nope:]

    def expand(self, latents: Floats, weight: Weights, nope: int, out: Floats) -> None:
        as_tensor(out).copy_(torch.einsum("rhk,hvk->rhv", as_tensor(latents), as_tensor(weight).float()[:, nope:]))

    def route(self, logits: Floats, bias: Floats, routing: Routing, experts: Indices, weights: Floats) -> None:
        raw = as_tensor(logits)
        scores = raw.sigmoid() if routing.sigmoid else raw.softmax(-1)
        choice = scores + as_tensor(bias) if len(bias) else scores
        if routing.kept_groups < routing.groups:
            grouped = choice.unflatten(-1, (routing.groups, -1))
            kept = grouped.topk(2, -1).values.sum(-1).topk(routing.kept_groups, -1).indices
            mask = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter_(1, kept, True)
            choice = grouped.masked_fill(~mask[:, :, None], float("-inf")).flatten(1)
        chosen = choice.topk(routing.top_k, -1).indices.sort(-1).values
        picked = scores.gather(1, chosen)
        if routing.normalise:
            picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)
        as_tensor(experts).copy_(chosen)
        as_tensor(weights).copy_(picked * routing.scale)

    def combine(self, results: Floats, place: Indices, weights: Floats, out: Floats) -> None:
        as_tensor(out).copy_((as_tensor(results)[as_tensor(place)] * as_tensor(weights)[:, :, None]).sum(1))

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


def _attend_latents(queries: Floats, first: int, latents: torch.Tensor, scale: float, rank: int) -> Floats:
    """Attention of one sequence's rows over its latents `(tokens of whole pages, rank + rope)`."""
    rows, length = len(queries), first + len(queries)
    latents = latents[:length]
    scores = torch.einsum("rhd,td->rht", as_tensor(queries), latents) * scale
    behind = torch.arange(length)[None, :] > (first + torch.arange(rows))[:, None]
    weights = scores.masked_fill(behind[:, None, :], float("-inf")).softmax(-1)
    result: Floats = torch.einsum("rht,tk->rhk", weights, latents[:, :rank]).contiguous().numpy()
    return result
