"""What the sender keeps of one handoff beside its state machine: pages, the current chunk, transfers, times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.hooks import Chunk
from pdserve.messenger.handoff.prefill import PrefillHandoff
from pdserve.messenger.timings import WriteLog
from pdserve.messenger.wire import HandoffRequest, PrefillTimings, RegionGrant
from pdserve.types import PageIndex, RequestId
from policies.plan import LayerWrites, RankWrites
from transport.api import PagedWrite, SourceRegion


def _no_pages() -> NDArray[np.int64]:
    return np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class SourceHandoff:
    request: HandoffRequest
    received_at: float
    page_size: int
    entries: tuple[RankWrites, ...]  # of the plan: who writes what to whom
    machine: PrefillHandoff = field(default_factory=PrefillHandoff)
    pages: tuple[PageIndex, ...] = ()
    started_at: float = 0.0
    computed_at: float = 0.0
    drained_at: float = 0.0
    hold: bool = False  # the decode node may still read the pages: see `Sources.stop_all`
    cancelled: bool = False  # by the decode node
    drain_by: float | None = None  # once it is stopped: how long its writes in flight may take
    chunk_source: NDArray[np.int64] = field(default_factory=_no_pages)  # pages of the current chunk, here
    chunk_target: NDArray[np.int64] = field(default_factory=_no_pages)  # and there
    log: WriteLog = field(default_factory=WriteLog)
    _computed: list[tuple[int, float]] = field(default_factory=list)  # layers not yet posted, when they were seen

    @property
    def job_id(self) -> RequestId:
        return RequestId(str(self.request.id))

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt without its last token: what is prefilled."""
        return self.request.prompt[:-1]

    @property
    def deadline(self) -> float:
        return self.received_at + self.request.timeout_s

    @property
    def has_writes(self) -> bool:
        """Whether the current chunk has pages that D lacks."""
        return len(self.chunk_source) > 0

    def begin_chunk(self, chunk: Chunk, now: float) -> None:
        self.started_at = self.started_at or now
        self.log.begin_chunk(chunk.start, chunk.end)
        self._computed = []
        first = max(chunk.start // self.page_size, self.request.present_pages)
        stop = max(first, -(-chunk.end // self.page_size))
        skipped = self.request.present_pages
        self.chunk_source = np.asarray(self.pages[first:stop], dtype=np.int64)
        self.chunk_target = np.asarray(self.request.pages[first - skipped : stop - skipped], dtype=np.int64)

    def computed(self, layers: range) -> None:
        now = time.monotonic()
        self._computed.extend((layer, now) for layer in layers)

    def take_computed(self) -> list[tuple[int, float]]:
        """Layers to post now, in order, and when each was seen to be computed."""
        layers, self._computed = self._computed, []
        return layers

    def layer_write(
        self, entry: RankWrites, numbers: LayerWrites, source: SourceRegion, grant: RegionGrant
    ) -> PagedWrite:
        """The current chunk's segments of one layer, each to its place at the decode node."""
        return PagedWrite(
            source=source,
            target=grant.descriptor,
            block_bytes=numbers.block_bytes,
            source_offset=numbers.source_offset,
            source_stride=numbers.source_stride,
            source_index=entry.source_segments.index(self.chunk_source),
            target_offset=numbers.target_offset,
            target_stride=numbers.target_stride,
            target_index=entry.target_segments.index(self.chunk_target),
            imm=self.request.imm,
        )

    def timings(self) -> PrefillTimings:
        return PrefillTimings(self.received_at, self.started_at, self.computed_at, self.drained_at, *self.log.summary())
