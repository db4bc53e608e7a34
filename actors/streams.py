"""From engine steps to HTTP replicas: one long-lived stream per replica, one item per step, never one per token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from pdserve.types import RequestId, SequenceOutput

LEASE_S = 60.0  # an HTTP replica that has not been heard of for so long is gone

Sink = Callable[[SequenceOutput], None]
_Queue = asyncio.Queue[tuple[SequenceOutput, ...] | None]


class OutputStreams:
    """Knows which replica each request belongs to. `emit` may be called from any thread, the rest from the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._owner: dict[RequestId, str] = {}
        self._sinks: dict[RequestId, Sink] = {}
        self._queues: dict[str, _Queue] = {}
        self._seen: dict[str, float] = {}

    def own(self, request_id: RequestId, replica: str) -> None:
        self._owner[request_id] = replica
        self._queues.setdefault(replica, asyncio.Queue())
        self._seen[replica] = time.monotonic()

    def disown(self, request_id: RequestId) -> None:
        """It was not taken after all."""
        self._owner.pop(request_id, None)

    def own_locally(self, request_id: RequestId, sink: Sink) -> None:
        """Outputs of this request go to `sink`, called on the loop."""
        self._sinks[request_id] = sink

    def emit(self, outputs: tuple[SequenceOutput, ...]) -> None:
        self._loop.call_soon_threadsafe(self._dispatch, outputs)

    def _dispatch(self, outputs: tuple[SequenceOutput, ...]) -> None:
        per_replica: dict[str, list[SequenceOutput]] = {}
        for output in outputs:
            ended = output.finish is not None
            if (sink := self._sinks.get(output.request_id)) is not None:
                if ended:
                    del self._sinks[output.request_id]
                sink(output)
            elif (replica := self._owner.get(output.request_id)) is not None:
                if ended:
                    del self._owner[output.request_id]
                per_replica.setdefault(replica, []).append(output)
        for replica, items in per_replica.items():
            self._queues[replica].put_nowait(tuple(items))

    async def stream(self, replica: str) -> AsyncIterator[tuple[SequenceOutput, ...]]:
        """The steps of one replica's requests, until `close`. What piled up meanwhile goes out as one item.

        A replica has one stream: a later call ends the earlier one and takes what that had not sent.
        """
        self.renew(replica)
        queue = self._take_over(replica)
        while (item := await queue.get()) is not None:
            outputs = list(item)
            while not queue.empty():
                more = queue.get_nowait()
                if more is None:
                    yield tuple(outputs)
                    return
                outputs += more
            yield tuple(outputs)

    def _take_over(self, replica: str) -> _Queue:
        before = self._queues.get(replica)
        queue = self._queues[replica] = asyncio.Queue()
        if before is not None:
            while not before.empty():
                queue.put_nowait(before.get_nowait())
            before.put_nowait(None)
        return queue

    def renew(self, replica: str) -> None:
        self._seen[replica] = time.monotonic()

    def expire(self, patience_s: float) -> list[RequestId]:
        """Forgets replicas that have not renewed their lease, and returns their requests: nobody reads their tokens."""
        gone = {who for who, seen in self._seen.items() if time.monotonic() - seen > patience_s}
        for replica in gone:
            del self._seen[replica]
            queue = self._queues.pop(replica, None)
            if queue is not None:
                queue.put_nowait(None)
        abandoned = [request_id for request_id, replica in self._owner.items() if replica in gone]
        for request_id in abandoned:
            del self._owner[request_id]
        return abandoned

    async def keep_leases(self, patience_s: float, cancel: Callable[[RequestId], None]) -> None:
        """Runs for as long as the node: cancels what belongs to replicas that are gone."""
        while True:
            await asyncio.sleep(patience_s / 10)
            for request_id in self.expire(patience_s):
                cancel(request_id)

    def close(self) -> None:
        for queue in self._queues.values():
            queue.put_nowait(None)
