"""What the demo knows of each request, and the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from pdserve.demo.prompts import DemoPrompt
from pdserve.messenger.target import HandoffTrace
from pdserve.messenger.wire import PrefillTimings


@dataclass(slots=True)
class Streamed:
    """One answer as its HTTP client saw it. Times in seconds after the request was sent."""

    request_id: str = ""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)  # one per token
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    prompt: DemoPrompt
    streamed: Streamed
    trace: HandoffTrace | None
    colocated: Sequence[int]

    @property
    def equal(self) -> bool:
        return self.streamed.error is None and list(self.streamed.tokens) == list(self.colocated)

    @property
    def timings(self) -> PrefillTimings:
        assert self.trace is not None and self.trace.timings is not None
        return self.trace.timings

    @property
    def gaps_s(self) -> list[float]:
        arrivals = self.streamed.arrivals
        return [after - before for before, after in pairwise(arrivals)]

    @property
    def bytes_before_prefill_end(self) -> int:
        """Bytes of writes that had completed when the last forward pass ended."""
        end = self.timings.computed_at
        return sum(layer.bytes for layer in self.timings.layers if layer.completed_at <= end)

    @property
    def exposed_s(self) -> float:
        """From the end of the prefill's compute until the decode node had counted everything in."""
        assert self.trace is not None
        return self.trace.ready_at - self.timings.computed_at

    @property
    def layer_compute_s(self) -> float:
        """Median time from one layer to the next, as the watcher saw it."""
        layers = self.timings.layers
        pairs = pairwise(layers)
        gaps = [b.computed_at - a.computed_at for a, b in pairs if a.chunk == b.chunk and b.computed_at > a.computed_at]
        return median(gaps) if gaps else 0.0

    def as_json(self) -> dict[str, Any]:
        assert self.trace is not None
        trace, timings = self.trace, self.timings
        return {
            "name": self.prompt.name,
            "prompt_tokens": len(self.prompt.tokens),
            "completion_tokens": len(self.streamed.tokens),
            "provider": trace.provider,
            "chunks": [list(chunk) for chunk in timings.chunks],
            "prefill_queue_s": timings.started_at - timings.received_at,
            "prefill_compute_s": timings.computed_at - timings.started_at,
            "layer_compute_s": self.layer_compute_s,
            "writes_expected": trace.writes_expected,
            "writes_counted": trace.writes_counted,
            "writes_posted": trace.writes_posted,
            "bytes": trace.bytes_expected,
            "bytes_completed_before_prefill_end": self.bytes_before_prefill_end,
            "exposed_transfer_s": self.exposed_s,
            "ttft_s": self.streamed.arrivals[0],
            "itl_s": median(self.gaps_s) if self.gaps_s else 0.0,
            "equal_to_colocated": self.equal,
            "text": self.streamed.text,
            "layers": [
                {
                    "chunk": layer.chunk,
                    "layer": layer.layer,
                    "computed_s": layer.computed_at - timings.started_at,
                    "posted_s": layer.posted_at - timings.started_at,
                    "completed_s": layer.completed_at - timings.started_at,
                    "writes": layer.writes,
                    "bytes": layer.bytes,
                }
                for layer in timings.layers
            ],
        }
