"""When layers of a handoff were computed, posted and completed: a row per layer and chunk, and not too many rows."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.messenger.wire import LAYER_ROWS, LayerTiming
from transport.api import Transfer
from transport.errors import TransportClosed

TokenRange = tuple[int, int]


@dataclass(slots=True)
class _Row:
    """One layer of one chunk: its transfers to all pairs of ranks."""

    computed_at: float
    posted_at: float  # the first of them
    transfers: list[Transfer]
    bytes: int = 0

    def timing(self, chunk: int, layer: int) -> LayerTiming:
        return LayerTiming(
            chunk=chunk,
            layer=layer,
            computed_at=self.computed_at,
            posted_at=self.posted_at,
            completed_at=max(transfer.finished_at or 0.0 for transfer in self.transfers),
            writes=sum(transfer.completed for transfer in self.transfers),
            bytes=self.bytes,
        )


class WriteLog:
    """What was submitted of one handoff, by chunk and layer."""

    def __init__(self) -> None:
        self._chunks: list[TokenRange] = []
        self._rows: dict[tuple[int, int], _Row] = {}

    def begin_chunk(self, start: int, end: int) -> None:
        self._chunks.append((start, end))

    def submitted(self, layer: int, times: tuple[float, float], transfer: Transfer, size_bytes: int) -> None:
        """`times`: when the layer was seen to be computed, and when these writes were handed to the transport."""
        row = self._rows.setdefault((len(self._chunks) - 1, layer), _Row(*times, transfers=[]))
        row.transfers.append(transfer)
        row.bytes += size_bytes

    def cancel(self) -> None:
        """Nothing more of what was submitted is posted."""
        for row in self._rows.values():
            for transfer in row.transfers:
                if not transfer.done:
                    with contextlib.suppress(TransportClosed):  # then it is done
                        transfer.cancel()

    def summary(self) -> tuple[tuple[TokenRange, ...], tuple[LayerTiming, ...]]:
        """Chunks and layers, once all transfers are done: see `condensed`."""
        return condensed(self._chunks, [row.timing(*key) for key, row in self._rows.items()])


def condensed(
    chunks: Sequence[TokenRange], layers: Sequence[LayerTiming], most: int = LAYER_ROWS
) -> tuple[tuple[TokenRange, ...], tuple[LayerTiming, ...]]:
    """At most `most` chunks, and rows of layers unless one chunk has more layers than that.

    Neighbouring chunks are joined two by two until that holds; writes and bytes are summed.
    """
    ranges, rows = tuple(chunks), tuple(layers)
    while len(ranges) > 1 and max(len(ranges), len(rows)) > most:
        ranges = tuple((ranges[at][0], ranges[min(at + 1, len(ranges) - 1)][1]) for at in range(0, len(ranges), 2))
        rows = _joined(rows)
    return ranges, rows


def _joined(rows: Sequence[LayerTiming]) -> tuple[LayerTiming, ...]:
    joined: dict[tuple[int, int], LayerTiming] = {}
    for row in rows:
        key = row.chunk // 2, row.layer
        before = joined.get(key)
        joined[key] = replace(row, chunk=key[0]) if before is None else _sum(before, row)
    return tuple(joined.values())


def _sum(before: LayerTiming, row: LayerTiming) -> LayerTiming:
    return replace(
        before,
        completed_at=max(before.completed_at, row.completed_at),
        writes=before.writes + row.writes,
        bytes=before.bytes + row.bytes,
    )
