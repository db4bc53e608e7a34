"""The ragged batch: what one forward pass computes.

Rows are tokens. Sequence `s` owns rows `row_start[s] : row_start[s + 1]`, at consecutive positions from
`first_position[s]` on; its keys and values lie in the pages `page_table[s]`. A decode row is a sequence of one row, a
prefill chunk one of many; both may be in one batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    tokens: NDArray[np.int64]  # (rows,) token ids
    row_start: NDArray[np.int64]  # (sequences + 1,)
    first_position: NDArray[np.int64]  # (sequences,) position of each sequence's first row
    page_table: NDArray[np.int64]  # (sequences, max_pages) page indices; unused entries are 0 and never read
    logit_rows: NDArray[np.int64]  # (logits,) rows whose next-token logits are wanted; may be empty

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def sequences(self) -> int:
        return len(self.first_position)
