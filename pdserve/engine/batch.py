"""From a plan to the ragged batch of one forward pass, in buffers that are used again."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

import numpy as np
from numpy.typing import NDArray

from pdserve.attention.batch import RaggedBatch
from pdserve.engine.scheduler import Span
from pdserve.engine.sequence import Paged, Sequence


class BatchBuilder:
    """Builds one batch at a time: the arrays of a batch are overwritten by the next one."""

    def __init__(self) -> None:
        self._tokens: NDArray[np.int64] = np.zeros(64, dtype=np.int64)
        self._row_start: NDArray[np.int64] = np.zeros(65, dtype=np.int64)
        self._positions: NDArray[np.int64] = np.zeros(64, dtype=np.int64)
        self._table: NDArray[np.int64] = np.zeros(64 * 16, dtype=np.int64)
        self._counting: NDArray[np.int64] = np.arange(65, dtype=np.int64)

    def build(self, decode: ListLike[Sequence], spans: ListLike[Span[Paged]]) -> RaggedBatch:
        """First one row for each of `decode`, whose logits are wanted; then the chunks, whose logits are not."""
        decoding, sequences = len(decode), len(decode) + len(spans)
        rows = decoding + sum(span.end - span.start for span in spans)
        self._reserve(rows, sequences)
        self._tokens[:decoding] = [sequence.last_token for sequence in decode]
        self._positions[:decoding] = [sequence.computed_tokens for sequence in decode]
        self._row_start[: decoding + 1] = self._counting[: decoding + 1]
        row = decoding
        for index, span in enumerate(spans, decoding):
            end = row + span.end - span.start
            self._tokens[row:end] = span.progress.tokens[span.start : span.end]
            self._positions[index] = span.start
            self._row_start[index + 1] = row = end
        return RaggedBatch(
            tokens=self._tokens[:rows],
            row_start=self._row_start[: sequences + 1],
            first_position=self._positions[:sequences],
            page_table=self._page_table([*decode, *(span.progress for span in spans)]),
            logit_rows=self._counting[:decoding],
        )

    def _page_table(self, batch: list[Paged]) -> NDArray[np.int64]:
        width = max((paged.held_pages for paged in batch), default=0)
        size = len(batch) * width
        if size > len(self._table):
            self._table = np.zeros(2 * size, dtype=np.int64)
        table = self._table[:size].reshape(len(batch), width)
        table.fill(0)
        for row, paged in zip(table, batch, strict=True):
            row[: paged.held_pages] = paged.pages
        return table

    def _reserve(self, rows: int, sequences: int) -> None:
        if rows > len(self._tokens):
            self._tokens = np.zeros(2 * rows, dtype=np.int64)
        if sequences > len(self._positions):
            self._positions = np.zeros(2 * sequences, dtype=np.int64)
            self._row_start = np.zeros(2 * sequences + 1, dtype=np.int64)
            self._counting = np.arange(2 * sequences + 1, dtype=np.int64)
