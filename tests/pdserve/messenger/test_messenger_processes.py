"""Handoffs between processes, over the wires of one host; nodes are killed in the middle of a transfer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.types import NodeId, Role
from tests.pdserve.engine.toy import eventually
from tests.pdserve.messenger.pair import (
    PATIENCE_S,
    SETTINGS,
    DecodeSide,
    LayerGate,
    PrefillSide,
    SteppedModel,
)
from tests.pdserve.messenger.processes import decode_process, prefill_process, started
from transport.open import open_transport

P0, P1, D0 = NodeId("p0"), NodeId("p1"), NodeId("d0")


@pytest.fixture(params=["shm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tcp", "tcp;ofi_rxm", "ucx"))])
def provider(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def test_a_prefill_node_is_killed_in_mid_transfer(provider: str) -> None:
    """First all is well; then kill -9, which the pidfd proves; another node takes over, and nothing is lost."""
    with ExitStack() as stack:
        process, p0 = stack.enter_context(started(prefill_process, "p0", provider, 1001, 4))
        _, p1 = stack.enter_context(started(prefill_process, "p1", provider, 1002, 0))
        lines = {P0: p0, P1: p1}
        for line in lines.values():
            line.reader.start()
            assert line.introduced.wait(PATIENCE_S)
        asked: list[NodeId] = []

        def reroute(request_id: Any, exclude: frozenset[NodeId], reply: Any) -> None:
            asked.extend(exclude)
            reply(P1)

        decode = DecodeSide(D0, Role.DECODE, SteppedModel(lambda layer: None), SETTINGS, provider, open_transport)
        decode.start(
            SimpleNamespace(channel_to=lines.get, card_of=lambda node: lines[node].card, reroute=reroute)  # type: ignore[arg-type]
        )
        stack.callback(decode.close)
        for line in lines.values():
            line.control_here = decode.receiver.on_message
        first = decode.request("first", 30)  # two steps
        decode.check(first)
        trace = decode.receiver.trace(first.request_id)
        assert trace is not None and trace.writes_counted == trace.writes_expected == 8
        assert not p0.sent  # messages went by the link
        second = decode.request("second", 120)
        assert p0.reached.wait(PATIENCE_S)
        assert decode.transport.immediates.waiting == 1
        os.kill(process.pid, signal.SIGKILL)
        decode.check(second)
        assert asked == [P0]
        eventually(lambda: decode.at_rest, PATIENCE_S)
        assert decode.transport.immediates.late == 0


def test_a_decode_node_is_killed_in_mid_transfer(provider: str) -> None:
    """Over shm nothing towards it ever completes; the prefill node closes its link and has its pages back."""
    gate = LayerGate(1)
    prefill = PrefillSide(P0, Role.PREFILL, SteppedModel(gate), SETTINGS, provider, open_transport)
    try:
        with started(decode_process, provider, 2001, prefill.card) as (process, line):
            prefill.start(SimpleNamespace(channel_to=lambda node: line))  # type: ignore[arg-type]
            line.meet_here, line.control_here = prefill.sender.meet, prefill.sender.on_message
            line.reader.start()
            gate.wait()
            os.kill(process.pid, signal.SIGKILL)
            gate.open.set()
            eventually(lambda: prefill.sender.active == 0, PATIENCE_S)
            assert prefill.pool.free_pages == prefill.pool.total
            # Over tcp its writes may have gone into the socket's buffers: then the pidfd alone tells.
            eventually(lambda: prefill.transport.stats()["links_open"] == 0, PATIENCE_S)
    finally:
        prefill.close()
