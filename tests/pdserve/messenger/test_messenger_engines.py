"""Engines that fail, or refuse, in the middle of a handoff."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.messenger.wire import (
    Quiesced,
)
from pdserve.types import NodeId
from tests.pdserve.messenger.pair import Network
from tests.pdserve.messenger.stepped import SteppedModel

P0, P1, D0 = NodeId("p0"), NodeId("p1"), NodeId("d0")


class Fault:
    """Raises before one layer, once."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._left = 1

    def __call__(self, layer: int) -> None:
        if layer == self._layer and self._left:
            self._left -= 1
            raise RuntimeError("a kernel has failed")


@pytest.mark.parametrize("layer", [0, 1])
def test_a_prefill_step_fails(network: Network, layer: int) -> None:
    """The request is done again; the steps behind it bump the same counter, and nothing is concluded from that."""
    prefill = network.add_prefill(model=SteppedModel(Fault(layer)))
    decode = network.add_decode()
    requests = [decode.request(f"r{n}", 14) for n in range(6)]
    decode.check(*requests)
    attempts_made = [decode.receiver.trace(request.request_id).attempt for request in requests]  # type: ignore[union-attr]
    assert max(attempts_made) == 2 and prefill.sender.failures == 1
    network.settle()


def test_a_prefill_step_always_fails(network: Network) -> None:
    def fault(layer: int) -> None:
        raise RuntimeError("a kernel has failed")

    prefill = network.add_prefill(model=SteppedModel(fault))
    decode = network.add_decode()
    error = decode.error_of(decode.request("r", 30))
    assert error == "prefill failed: the prefill engine failed: a kernel has failed"
    assert prefill.sender.failures == 3
    network.settle()


def test_the_prefill_engine_refuses_a_job(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = network.add_prefill()
    decode = network.add_decode()
    take = prefill.engine.prefill
    refusals = [1]

    def refuse_once(job: Any) -> None:
        if refusals:
            refusals.pop()
            raise ValueError("not today")
        take(job)

    monkeypatch.setattr(prefill.engine, "prefill", refuse_once)
    decode.check(decode.request("r", 30))
    assert network.channels[D0].of(Quiesced)[0].reason == "the prefill engine refused: not today"
    network.settle()


def test_the_decode_engine_refuses_a_sequence(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    network.add_prefill()
    decode = network.add_decode()

    def refuse(*_: Any) -> None:
        raise ValueError("not today")

    monkeypatch.setattr(decode.engine, "submit_ready", refuse)
    assert decode.error_of(decode.request("r", 30)) == "not today"
    network.settle()


def test_writes_cannot_be_posted(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors that do not fit each other: the handoff ends, and its pages are free."""
    prefill = network.add_prefill()
    decode = network.add_decode()
    decode.check(decode.request("first", 30))
    link = next(iter(prefill.sender._peers._met.values())).link

    def refuse(*_: Any) -> None:
        raise ValueError("a block lies outside")

    monkeypatch.setattr(link, "write_paged", refuse)
    assert decode.error_of(decode.request("r", 30)) == "prefill failed: writes cannot be posted: a block lies outside"
    network.settle()
