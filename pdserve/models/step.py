"""What the layers of a forward pass share: where rows stand, their rotation, and working memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pdserve.attention.batch import RaggedBatch
from pdserve.ops.api import Floats, Rotation, RowPlan, Weights


@dataclass(frozen=True, slots=True)
class Step:
    plan: RowPlan
    rotation: Rotation


class Attention(Protocol):
    """The attention part of one layer; `block` is the layer's pages, `normed` and `out` are `(rows, hidden)`."""

    def append(self, normed: Floats, block: Weights, step: Step) -> None:
        """Writes what the rows leave in the cache."""
        ...

    def attend(self, normed: Floats, block: Weights, step: Step, out: Floats) -> None:
        """Appends, attends, and projects; `out` sums up over the tensor-parallel ranks."""
        ...


class FeedForward(Protocol):
    """The part of one layer behind its attention."""

    @property
    def collective(self) -> bool:
        """Whether ranks of other replicas wait for this one, rows or no rows."""
        ...

    def forward(self, normed: Floats, out: Floats) -> None:
        """`(rows, hidden)` both; `out` sums up over the tensor-parallel ranks."""
        ...


class Scratch:
    """Activations by name, kept between passes and grown when one is asked for with more elements.

    A name's memory stays the same while it is asked for with as many elements as before, or fewer.
    """

    def __init__(self) -> None:
        self._held: dict[str, Floats] = {}

    def rows(self, name: str, rows: int, width: int) -> Floats:
        """`(rows, width)` float32, contiguous."""
        held = self._held.get(name)
        if held is None or held.size < rows * width:
            held = self._held[name] = np.empty(rows * width, np.float32)
        return held[: rows * width].reshape(rows, width)


def plan_rows(batch: RaggedBatch, page_size: int) -> RowPlan:
    """Position, page and slot of every row. Raises ValueError where a sequence has fewer pages than it needs."""
    counts = np.diff(batch.row_start)
    sequence = np.repeat(np.arange(batch.sequences), counts)
    offset = np.arange(batch.rows) - batch.row_start[:-1][sequence]
    position = batch.first_position[sequence] + offset
    page_index = position // page_size
    if batch.rows and int(page_index.max()) >= batch.page_table.shape[1]:
        raise ValueError(
            f"position {int(position.max())} lies behind the page table's {batch.page_table.shape[1]} pages"
        )
    return RowPlan(
        row_start=np.ascontiguousarray(batch.row_start, np.int64),
        first_position=np.ascontiguousarray(batch.first_position, np.int64),
        page_table=np.ascontiguousarray(batch.page_table, np.int64),
        position=position.astype(np.int64, copy=False),
        page=batch.page_table[sequence, page_index].astype(np.int64, copy=False),
        slot=(position % page_size).astype(np.int64, copy=False),
    )
