"""The toy model with its cache on several ranks, all in this process: whatever is wrong anywhere is noticed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pdserve.attention.batch import RaggedBatch
from pdserve.kv.memory import KvMemory
from tests.pdserve.engine.toy import VOCAB, ToyModel, logits_of

HEAD = 128  # added per head, so that no two heads of a token are alike


class ShardedToy(ToyModel):
    """`kv_heads` None: a latent, of which every rank has a copy. `memories` are set before the first step."""

    def __init__(self, tp: int, kv_heads: int | None) -> None:
        super().__init__()
        self.tp = tp
        self.config = replace(self.config, kv_heads=kv_heads)
        self.memories: tuple[KvMemory, ...] = ()

    def forward(self, batch: RaggedBatch, cache: KvMemory, layer_counter: NDArray[np.int64]) -> NDArray[np.float32]:
        for layer in range(self.config.layers):
            for sequence in range(batch.sequences):
                self._fill(batch, layer, sequence)
            layer_counter[0] += 1
        logits = np.empty((len(batch.logit_rows), VOCAB), dtype=np.float32)
        for index, row in enumerate(batch.logit_rows):
            sequence = int(np.searchsorted(batch.row_start, row, side="right")) - 1
            last = int(batch.first_position[sequence] + row - batch.row_start[sequence])
            logits[index] = logits_of(self._tokens(batch, sequence, last + 1))
        return logits

    def _heads(self, rank: int) -> NDArray[np.int64]:
        """Which of the model's heads the rank holds."""
        kv_heads = self.config.kv_heads
        assert kv_heads is not None
        return np.arange(max(1, kv_heads // self.tp)) + kv_heads * rank // self.tp

    def _places(self, batch: RaggedBatch, sequence: int, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        page_size = self.memories[0].geometry.page_size
        return batch.page_table[sequence, positions // page_size], positions % page_size

    def _fill(self, batch: RaggedBatch, layer: int, sequence: int) -> None:
        tokens = batch.tokens[batch.row_start[sequence] : batch.row_start[sequence + 1]]
        positions = batch.first_position[sequence] + np.arange(len(tokens))
        pages, rows = self._places(batch, sequence, positions)
        for rank, memory in enumerate(self.memories):
            blocks = memory.layer(layer)
            if self.config.kv_heads is None:
                blocks[pages, rows] = np.stack((tokens, positions, tokens, positions), axis=1)
                continue
            for here, head in enumerate(self._heads(rank)):
                blocks[pages, 0, here, rows] = (tokens + HEAD * head)[:, None]
                blocks[pages, 1, here, rows] = (positions + HEAD * head)[:, None]

    def _tokens(self, batch: RaggedBatch, sequence: int, count: int) -> list[int]:
        """What all ranks, layers and heads agree to be this sequence's tokens."""
        positions = np.arange(count)
        pages, rows = self._places(batch, sequence, positions)
        seen = []
        for rank, memory in enumerate(self.memories):
            for layer in range(self.config.layers):
                blocks = memory.layer(layer)
                if self.config.kv_heads is None:
                    seen.append((blocks[pages, rows, 0], blocks[pages, rows, 1]))
                    seen.append((blocks[pages, rows, 2], blocks[pages, rows, 3]))
                    continue
                for here, head in enumerate(self._heads(rank)):
                    for dim in range(self.config.head_dim):
                        keys, values = blocks[pages, 0, here, rows, dim], blocks[pages, 1, here, rows, dim]
                        seen.append((keys - HEAD * head, values - HEAD * head))
        for tokens, found in seen:
            assert np.array_equal(found, positions) and np.array_equal(tokens, seen[0][0]), "the cache is not whole"
        return [int(token) for token in seen[0][0]]
