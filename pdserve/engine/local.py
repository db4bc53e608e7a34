"""An engine alone in a process: for tests, for comparisons with a colocated run, for experiments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from pdserve.config import EngineSettings
from pdserve.engine.engine import Engine
from pdserve.engine.limits import page_geometry
from pdserve.errors import PdserveError
from pdserve.kv.memory import KvMemory
from pdserve.kv.pool import PagePool
from pdserve.models.api import Model
from pdserve.types import FinishReason, GenerationRequest, RequestId, Role, SequenceOutput


class Collector:
    """Decode hooks that keep what comes, and let others wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tokens: dict[RequestId, list[int]] = {}
        self._last: dict[RequestId, SequenceOutput] = {}
        self.preemptions: list[tuple[GenerationRequest, tuple[int, ...]]] = []

    def step_outputs(self, outputs: tuple[SequenceOutput, ...]) -> None:
        with self._changed:
            for output in outputs:
                self._tokens.setdefault(output.request_id, []).extend(output.tokens)
                if output.finish is not None:
                    self._last[output.request_id] = output
            self._changed.notify_all()

    def preempted(self, request: GenerationRequest, generated: tuple[int, ...]) -> None:
        with self._changed:
            self.preemptions.append((request, generated))
            self._changed.notify_all()

    def tokens(self, request_id: RequestId) -> tuple[int, ...]:
        """What has come so far."""
        with self._changed:
            return tuple(self._tokens.get(request_id, ()))

    def wait_for_tokens(self, request_id: RequestId, count: int, timeout_s: float = 60.0) -> None:
        """Until the request has `count` tokens or has ended. Raises TimeoutError."""

        def arrived() -> bool:
            return request_id in self._last or len(self._tokens.get(request_id, ())) >= count

        self._wait(arrived, f"{count} tokens of request {request_id}", timeout_s)

    def finish(self, request_id: RequestId, timeout_s: float = 60.0) -> SequenceOutput:
        """The request's last output, with its finish reason. Raises TimeoutError."""
        self._wait(lambda: request_id in self._last, f"the end of request {request_id}", timeout_s)
        return self._last[request_id]

    def _wait(self, arrived: Callable[[], bool], what: str, timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(arrived, timeout_s):
                raise TimeoutError(f"{what} did not come within {timeout_s} s")


@contextmanager
def local_engine(model: Model, settings: EngineSettings) -> Iterator[Engine]:
    """A colocated engine with memory and pool of its own, for `generate`."""
    geometry = page_geometry(model.config, settings)
    with KvMemory(geometry) as memory:
        engine = Engine(model, memory, PagePool(geometry.pages), settings, Role.COLOCATED, decode_hooks=Collector())
        with engine:
            yield engine


def generate(
    engine: Engine, requests: Iterable[GenerationRequest], timeout_s: float = 600.0
) -> dict[RequestId, tuple[int, ...]]:
    """Runs the requests together, and waits for all: their tokens, an end-of-sequence token included.

    The engine is colocated and has a Collector (see `local_engine`). Raises what `Engine.submit` raises,
    PdserveError for a request that ended with an error or was cancelled, TimeoutError.
    """
    collector = engine.decode_hooks
    if not isinstance(collector, Collector):
        raise TypeError("generate needs an engine whose decode_hooks are a Collector, as local_engine makes it")
    ids = []
    for request in requests:
        engine.submit(request)
        ids.append(request.request_id)
    for request_id in ids:
        last = collector.finish(request_id, timeout_s)
        if last.finish in (FinishReason.ERROR, FinishReason.ABORT):
            raise PdserveError(f"request {request_id} ended with {last.finish}: {last.error}")
    return {request_id: collector.tokens(request_id) for request_id in ids}
