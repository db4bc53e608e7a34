"""Which layers of the running prefill step have finished: the engine's counter, read with care."""

from __future__ import annotations

from pdserve.engine.hooks import Chunk
from pdserve.types import RequestId


class LayerWatch:
    """Follows one step at a time. Owned by the sender's thread."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._base = 0
        self._seen = 0
        self._running = False
        self.chunks: tuple[Chunk, ...] = ()

    @property
    def running(self) -> bool:
        return self._running

    def begin(self, chunks: tuple[Chunk, ...], counter_base: int) -> None:
        self.chunks, self._base, self._seen, self._running = chunks, counter_base, 0, True

    def look(self, counter: int) -> range:
        """Layers that have finished since the last look.

        `counter` must have been read before it was seen that no event waits: a later step, which is announced before
        it runs, moves the counter on as well.
        """
        finished = counter - self._base
        if not self._running or not self._seen < finished <= self._layers:
            return range(0)
        new = range(self._seen, finished)
        self._seen = finished
        return new

    def end(self) -> range:
        """The step has run: the layers that no look has seen."""
        if not self._running:
            return range(0)
        self._running = False
        return range(self._seen, self._layers)

    def failed(self, job_id: RequestId) -> None:
        """If its step was this one, nothing may be concluded from the counter any more."""
        if any(chunk.job_id == job_id for chunk in self.chunks):
            self._running = False
