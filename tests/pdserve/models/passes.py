"""Forward passes for tests: pages whose bytes nobody has written are NaN, and every pass checks the layer counter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.attention.batch import RaggedBatch
from pdserve.kv.memory import KvMemory
from pdserve.models.build import rank_kv_heads
from pdserve.models.decoder import Decoder
from policies.layout import KvLayout, PageGeometry
from tests.pdserve.models.tiny import VOCAB

PAGE = 8
PAGES = 64
Part = tuple[Sequence[int], int, int]  # tokens, first position, first page of a run of 16


@contextmanager
def cache_for(model: Decoder, dtype: str, page_size: int = PAGE, layout: KvLayout = KvLayout.HND) -> Iterator[KvMemory]:
    config = model.config
    heads = rank_kv_heads(config, model.parallel.tp.size)
    geometry = PageGeometry(
        config.layers, heads, config.head_dim, page_size, 2 if dtype == "bf16" else 4, PAGES, layout
    )
    with KvMemory(geometry) as memory:
        memory.blocks[...] = 0x7FC0 if dtype == "bf16" else np.nan
        yield memory


def forward(
    model: Decoder, cache: KvMemory, parts: Sequence[Part], logits: Sequence[int] | None = None
) -> NDArray[np.float32]:
    """By default every row's logits."""
    counts = [len(tokens) for tokens, _, _ in parts]
    batch = RaggedBatch(
        tokens=np.array([token for tokens, _, _ in parts for token in tokens], np.int64),
        row_start=np.cumsum([0, *counts]).astype(np.int64),
        first_position=np.array([first for _, first, _ in parts], np.int64),
        page_table=np.array([np.arange(page, page + 16)[::-1] for _, _, page in parts], np.int64).reshape(-1, 16),
        logit_rows=np.arange(sum(counts)) if logits is None else np.asarray(logits, np.int64),
    )
    counter = np.zeros(1, np.int64)
    result = model.forward(batch, cache, counter)
    assert counter[0] == model.config.layers
    return result


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def choice(model: Decoder, logits: NDArray[np.float32]) -> int:
    """The greedy token; min_new_tokens of transformers forbids the end token, so does this."""
    logits = logits.copy()
    logits[list(model.config.eos_token_ids)] = -np.inf
    return int(logits.argmax())


def greedy(model: Decoder, cache: KvMemory, logits: NDArray[np.float32], position: int, count: int) -> list[int]:
    found = [choice(model, logits)]
    while len(found) < count:
        found.append(choice(model, forward(model, cache, [([found[-1]], position + len(found) - 1, 0)])[0]))
    return found


def reference_of(directory: Path, tokens: Sequence[int], count: int) -> tuple[NDArray[np.float32], list[int]]:
    """transformers' logits of every row, and its greedy continuation."""
    import torch
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = torch.tensor([list(tokens)])
    with torch.no_grad():
        logits = reference(prompt).logits[0].numpy()
        output = reference.generate(
            prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, suppress_tokens=None
        )
    return logits, output[0, len(tokens) :].tolist()
