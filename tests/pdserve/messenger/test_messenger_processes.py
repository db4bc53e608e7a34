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
from tests.pdserve.messenger.pair import PATIENCE_S, SETTINGS, DecodeSide, PrefillSide
from tests.pdserve.messenger.processes import Line, decode_process, prefill_process, started
from tests.pdserve.messenger.stepped import LayerGate, SteppedModel
from transport.open import open_transport

P0, P1, D0 = NodeId("p0"), NodeId("p1"), NodeId("d0")


MORE = ("tcp", "tcp;ofi_rxm", "sockets", "ucx")


@pytest.fixture(params=["shm", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def provider(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def decode_side(provider: str, lines: dict[NodeId, Line], reroute: Any = None) -> DecodeSide:
    side = DecodeSide(D0, Role.DECODE, SteppedModel(lambda layer: None), SETTINGS, provider, open_transport)
    side.start(
        SimpleNamespace(channel_to=lines.get, card_of=lambda node: lines[node].card, reroute=reroute)  # type: ignore[arg-type]
    )
    for line in lines.values():
        line.control_here = side.receiver.on_message
    return side


def test_handoffs_between_two_processes(provider: str) -> None:
    """Several at once, of one and of many chunks: right tokens, exact counts, nothing held on either side."""
    with ExitStack() as stack:
        _, line = stack.enter_context(started(prefill_process, "p0", provider, 1001, 0))
        line.reader.start()
        assert line.introduced.wait(PATIENCE_S)
        decode = decode_side(provider, {P0: line})
        stack.callback(decode.close)
        requests = [decode.request(f"r{tokens}", tokens) for tokens in (2, 8, 9, 17, 64, 120)]
        decode.check(*requests)
        for request in requests:
            name, pages = request.request_id, -(-(len(request.prompt) - 1) // SETTINGS.page_size)
            eventually(lambda: decode.receiver.trace(name).writes_posted is not None, PATIENCE_S)  # type: ignore[union-attr] # noqa: B023
            trace = decode.receiver.trace(name)
            assert trace is not None and trace.timings is not None
            count = decode.model.config.layers * pages
            assert trace.writes_expected == trace.writes_counted == trace.writes_posted == count
            assert sum(layer.writes for layer in trace.timings.layers) == count
        eventually(lambda: decode.at_rest, PATIENCE_S)
        assert decode.transport.immediates.late == decode.transport.immediates.overflow == 0


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

        decode = decode_side(provider, lines, reroute)
        stack.callback(decode.close)
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
