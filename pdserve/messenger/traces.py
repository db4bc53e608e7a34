"""What is known of the last handoffs: one trace per request, the oldest ones dropped."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import replace

from pdserve.messenger.peers import Peer
from pdserve.messenger.target import HandoffTrace, TargetHandoff
from pdserve.messenger.wire import Done, HandoffId
from pdserve.types import RequestId

KEPT = 1024


class Traces:
    """Written by the receiver's thread alone."""

    def __init__(self) -> None:
        self._traces: OrderedDict[RequestId, HandoffTrace] = OrderedDict()
        self._traced: dict[HandoffId, RequestId] = {}

    def get(self, request_id: RequestId) -> HandoffTrace | None:
        """From any thread."""
        return self._traces.get(request_id)

    def begin(self, entry: TargetHandoff, peer: Peer, writes: int, size_bytes: int) -> None:
        before = self._traces.pop(entry.request_id, None)
        if before is not None:
            del self._traced[before.handoff]
        self._traced[entry.id] = entry.request_id
        self._traces[entry.request_id] = HandoffTrace(
            request_id=entry.request_id,
            handoff=entry.id,
            prefill=peer.node,
            provider=peer.provider,
            attempt=1 if before is None else before.attempt + 1,
            prompt_tokens=len(entry.tokens),
            requested_at=time.monotonic(),
            writes_expected=writes,
            bytes_expected=size_bytes,
        )
        while len(self._traces) > KEPT:
            _, oldest = self._traces.popitem(last=False)
            del self._traced[oldest.handoff]

    def done(self, message: Done) -> None:
        """What P says of its part."""
        request_id = self._traced.get(message.id)
        if request_id is not None:
            trace = self._traces[request_id]
            self._traces[request_id] = replace(trace, writes_posted=message.posted, timings=message.timings)

    def ready(self, entry: TargetHandoff, counted: int) -> None:
        """All of it has been counted in."""
        trace = self._traces.get(entry.request_id)
        if trace is not None and trace.handoff == entry.id:
            self._traces[entry.request_id] = replace(trace, writes_counted=counted, ready_at=entry.full_at)
