"""A forward pass's batch as bytes: what the leader tells the other ranks of a step.

Four numbers (rows, sequences, pages a sequence, logits), then the batch's arrays one after another as int32.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from pdserve.attention.batch import RaggedBatch

_HEAD = struct.Struct("<4I")


def encode_step(batch: RaggedBatch) -> bytes:
    sequences, width = batch.page_table.shape
    arrays = (batch.tokens, batch.row_start, batch.first_position, batch.page_table.reshape(-1), batch.logit_rows)
    head = _HEAD.pack(batch.rows, sequences, width, len(batch.logit_rows))
    return head + np.concatenate(arrays, dtype=np.int32, casting="same_kind").tobytes()


def decode_step(data: bytes | bytearray) -> RaggedBatch:
    rows, sequences, width, logits = _HEAD.unpack_from(data)
    lengths = (rows, sequences + 1, sequences, sequences * width, logits)
    numbers: NDArray[np.int64] = np.frombuffer(data, np.int32, offset=_HEAD.size).astype(np.int64)
    assert len(numbers) == sum(lengths)
    tokens, row_start, first_position, table, logit_rows = np.split(numbers, np.cumsum(lengths[:-1]))
    return RaggedBatch(tokens, row_start, first_position, table.reshape(sequences, width), logit_rows)


def counter_for(batch: RaggedBatch, layer_counter: NDArray[np.int64]) -> NDArray[np.int64]:
    """What a step counts its layers in. Those of an empty one count nowhere: whoever watches a replica's counter has
    been told of the replica's own next step, and would take them for layers of that.
    """
    return layer_counter if batch.rows else np.zeros(1, np.int64)


EMPTY_STEP = RaggedBatch(
    tokens=np.zeros(0, np.int64),
    row_start=np.zeros(1, np.int64),
    first_position=np.zeros(0, np.int64),
    page_table=np.zeros((0, 0), np.int64),
    logit_rows=np.zeros(0, np.int64),
)
"""Of a replica that only takes part because it holds experts."""
