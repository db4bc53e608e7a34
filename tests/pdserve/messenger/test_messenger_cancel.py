"""The caller cancels, or a node closes, at any stage: no page, slot or counter is lost on either side."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pdserve.messenger.wire import (
    Accept,
    Done,
    HandoffRequest,
    Quiesced,
)
from pdserve.types import FinishReason, NodeId
from tests.pdserve.engine.toy import Gate, ToyModel, eventually
from tests.pdserve.messenger.pair import PATIENCE_S, QUICK, Network, loopback
from tests.pdserve.messenger.stepped import LayerGate, SteppedModel
from tests.pdserve.messenger.taps import Keep

P0, P1, D0 = NodeId("p0"), NodeId("p1"), NodeId("d0")


def test_cancel_before_the_meeting_ends(network: Network) -> None:
    network.add_prefill()
    decode = network.add_decode()
    kept: list[tuple[Any, ...]] = []
    network.channels[P0].tamper_meeting = lambda *call: kept.append(call)
    request = decode.request("r", 30)
    eventually(lambda: bool(kept))
    decode.receiver.cancel(request.request_id)
    decode.wait(request)
    assert decode.ended[request.request_id].finish is FinishReason.ABORT
    network.channels[P0].meet_now(*kept[0])
    again = decode.request("again", 30)
    decode.check(again)
    assert len(network.channels[P0].of(HandoffRequest)) == 1
    network.settle()


def test_cancel_overtakes_its_request(network: Network) -> None:
    """The tombstone answers the request when it comes: nothing is computed or written."""
    model = SteppedModel(lambda layer: None)
    network.add_prefill(model=model)
    decode = network.add_decode()
    network.channels[P0].tamper = keep = Keep(HandoffRequest)
    request = decode.request("r", 30)
    keep.wait()
    decode.receiver.cancel(request.request_id)
    decode.wait(request)
    network.settle()  # the pages are back before the request arrives …
    keep.release()
    eventually(lambda: len(network.channels[D0].of(Quiesced)) == 2)
    assert [(answer.posted, answer.id) for answer in network.channels[D0].of(Quiesced)] == [
        (0, network.channels[P0].of(HandoffRequest)[0].id)
    ] * 2
    assert not model.batches  # … and it touches none of them
    assert not network.channels[D0].of(Accept)
    network.settle()


@pytest.mark.parametrize("layer", [0, 1])
def test_cancel_in_mid_prefill(network: Network, layer: int) -> None:
    """It is answered although the engine is still in its step; the source pages wait for the step."""
    gate = LayerGate(layer)
    prefill = network.add_prefill(model=SteppedModel(gate))
    decode = network.add_decode()
    request = decode.request("r", 40)
    gate.wait()
    eventually(lambda: prefill.transport.stats()["writes_completed"] == 2 * layer)
    decode.receiver.cancel(request.request_id)
    decode.wait(request)
    eventually(lambda: decode.at_rest)
    assert network.channels[D0].of(Quiesced)[0].posted == 2 * layer
    assert prefill.pool.used_pages == 5 and prefill.sender.active == 1
    gate.open.set()
    network.settle()
    assert prefill.transport.stats()["writes_posted"] == 2 * layer
    assert prefill.sender.failures == 0 and not any(decode.receiver.failures.values())


def test_cancel_while_it_waits_at_the_prefill_node(network: Network) -> None:
    gate = LayerGate(0)
    prefill = network.add_prefill(model=SteppedModel(gate), kv_cache_tokens=64)
    decode = network.add_decode()
    first = decode.request("first", 60)
    gate.wait()
    second = decode.request("second", 60)  # waits for source pages
    eventually(lambda: len(network.channels[D0].of(Accept)) == 2)
    assert prefill.sender.queued_tokens == 59
    decode.receiver.cancel(second.request_id)
    decode.wait(second)
    eventually(lambda: decode.receiver.handoffs == 1)
    gate.open.set()
    decode.check(first)
    network.settle()


@pytest.mark.parametrize("prompt_tokens", [9, 40, 100])
def test_cancel_while_writes_are_in_flight(prompt_tokens: int) -> None:
    """Pages stay in quarantine until every posted write has landed."""
    with loopback(delay_s=(0.0, 0.05)) as network:
        prefill = network.add_prefill()
        decode = network.add_decode()
        request = decode.request("r", prompt_tokens)
        eventually(lambda: prefill.transport.stats()["writes_posted"] > 0)
        decode.receiver.cancel(request.request_id)
        decode.wait(request)
        network.settle()
        assert decode.transport.immediates.late == 0


def test_cancel_while_it_decodes(network: Network) -> None:
    network.add_prefill()
    gate = Gate()
    decode = network.add_decode(model=ToyModel(before_step=gate))
    request = decode.request("r", 20, max_tokens=100)
    assert gate.reached.wait(PATIENCE_S)
    decode.receiver.cancel(request.request_id)
    gate.open.set()
    decode.wait(request)
    assert decode.ended[request.request_id].finish is FinishReason.ABORT
    network.settle()


def test_cancels_at_any_moment_leak_nothing() -> None:
    with loopback(3, (0.0, 0.01)) as network:
        for name in ("p0", "p1"):
            network.add_prefill(name, kv_cache_tokens=256)
        decode = network.add_decode(kv_cache_tokens=160)
        pause = threading.Event()
        requests = []
        for turn in range(24):
            requests.append(decode.request(f"r{turn}", 5 + 4 * turn, f"p{turn % 2}", max_tokens=20))
            pause.wait(0.003 * (turn % 5))
            if turn % 3:
                decode.receiver.cancel(requests[turn - turn % 3].request_id)
        decode.wait(*requests)
        network.settle()
        decode.check(*[r for r in requests if decode.ended[r.request_id].finish is not FinishReason.ABORT])


def test_preemption_and_cancel_at_once(network: Network) -> None:
    network.add_prefill()
    decode = network.add_decode(kv_cache_tokens=64)
    requests = [decode.request(f"r{n}", 10, max_tokens=50) for n in range(4)]
    for n in (1, 3, 2):
        eventually(lambda n=n: decode.engine.stats().preemptions >= n or requests[0].request_id in decode.ended)  # type: ignore[misc]
        decode.receiver.cancel(requests[n].request_id)
    decode.wait(*requests)
    decode.check(requests[0])
    network.settle()


def test_prefill_node_closes_with_writes_in_flight() -> None:
    with loopback(delay_s=(0.05, 0.1), handoff=QUICK) as network:
        prefill = network.add_prefill()
        decode = network.add_decode()
        request = decode.request("r", 100)
        eventually(lambda: prefill.transport.stats()["writes_posted"] > 0)
        network.down.add(P0)
        prefill.close()
        assert prefill.pool.free_pages == prefill.pool.total and prefill.sender.active == 0
        decode.wait(request)
        network.settle()


def test_decode_node_closes_with_requests_waiting(network: Network) -> None:
    gate = LayerGate(0)
    prefill = network.add_prefill(model=SteppedModel(gate))
    decode = network.add_decode()
    request = decode.request("r", 30)
    gate.wait()
    decode.close()
    decode.wait(request)
    output = decode.ended[request.request_id]
    assert (output.finish, output.error) == (FinishReason.ABORT, "the decode node is closing")
    assert decode.pool.free_pages == decode.pool.total
    gate.open.set()
    eventually(lambda: prefill.sender.active == 0)
    assert prefill.pool.free_pages == prefill.pool.total


def test_the_same_request_twice_is_one(network: Network) -> None:
    network.add_prefill()
    decode = network.add_decode()
    request = decode.request("r", 30)
    decode.receiver.start(request, P0)
    decode.check(request)
    network.settle()
    assert len(network.channels[D0].of(Done)) == 1
