"""Handoffs between real engines over real transports: the tokens are right, and the counts are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdserve.messenger.wire import Accept, Done, HandoffRequest, Reject
from pdserve.types import FinishReason, GenerationRequest
from tests.pdserve.engine.toy import eventually
from tests.pdserve.messenger.pair import DecodeSide, Network, loopback
from tests.pdserve.messenger.stepped import LayerGate, SteppedModel
from tests.pdserve.messenger.taps import drop
from transport.api import Transport
from transport.errors import ProviderUnavailable
from transport.open import open_transport

LENGTHS = (1, 2, 7, 8, 9, 10, 15, 16, 17, 18, 33, 64, 120)


VERBS = "verbs;ofi_rxm"


def open_verbs(provider: str) -> Transport:
    """Over all RDMA devices; skips where there is none."""
    try:
        return open_transport(provider, spin=False)
    except ProviderUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(
    params=[
        "loopback in order", "loopback seed 1", "loopback seed 2", "tcp", "tcp over 2 NICs", "ucx",
        pytest.param(VERBS, marks=pytest.mark.slow),
    ]
)  # fmt: skip
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    if request.param in ("tcp", "ucx"):
        made = Network(open_transport, request.param)
    elif request.param == VERBS:
        made = Network(open_verbs, VERBS)
    elif request.param == "tcp over 2 NICs":
        made = Network(lambda provider: open_transport(provider, nics=("127.0.0.1", "127.0.0.2")), "tcp")
    elif request.param == "loopback in order":
        made = loopback(None, (0.0, 0.0))
    else:
        made = loopback(int(request.param[-1]))
    with made:
        yield made


def exact(decode: DecodeSide, *requests: GenerationRequest) -> None:
    """The immediates counted are those expected, by the formula, and those posted."""
    layers, page_size = decode.model.config.layers, decode.settings.page_size
    for request in requests:
        trace = decode.receiver.trace(request.request_id)
        if len(request.prompt) == 1:
            assert trace is None
            continue
        eventually(lambda: decode.receiver.trace(request.request_id).writes_posted is not None, 20)  # type: ignore[union-attr] # noqa: B023
        trace = decode.receiver.trace(request.request_id)
        assert trace is not None and trace.timings is not None
        formula = layers * -(-(len(request.prompt) - 1) // page_size)
        assert trace.writes_expected == trace.writes_counted == trace.writes_posted == formula
        assert sum(layer.writes for layer in trace.timings.layers) == formula
    assert decode.transport.immediates.late == decode.transport.immediates.overflow == 0


def test_tokens_and_counts(network: Network) -> None:
    network.add_prefill()
    decode = network.add_decode()
    requests = [decode.request(f"r{tokens}", tokens) for tokens in LENGTHS]
    decode.check(*requests)
    network.settle()
    exact(decode, *requests)


def test_several_of_both(network: Network) -> None:
    prefill = [network.add_prefill(f"p{number}") for number in range(2)]
    decode = [network.add_decode(f"d{number}") for number in range(2)]
    requests = {
        side.node: [side.request(f"{side.node}-{n}", 5 + 9 * n, f"p{(n + turn) % 2}") for n in range(6)]
        for turn, side in enumerate(decode)
    }
    for side in decode:
        side.check(*requests[side.node])
    network.settle()
    for side in decode:
        exact(side, *requests[side.node])
        used = {side.receiver.trace(request.request_id).prefill for request in requests[side.node]}  # type: ignore[union-attr]
        assert used == {source.node for source in prefill}


@pytest.mark.parametrize("lost", [Done, Accept, (Done, Accept)], ids=["done", "accept", "both"])
def test_no_message_makes_a_request_ready(lost: Any) -> None:
    """The acknowledgement is dropped; decoding starts by the count alone."""
    with loopback() as network:
        network.add_prefill()
        decode = network.add_decode()
        network.channels[decode.node].tamper = drop(*(lost if isinstance(lost, tuple) else (lost,)))
        requests = [decode.request(f"r{tokens}", tokens) for tokens in (9, 40)]
        decode.check(*requests)
        network.settle()
        for request in requests:
            trace = decode.receiver.trace(request.request_id)
            assert trace is not None and trace.writes_counted == trace.writes_expected


def test_done_alone_makes_nothing_ready() -> None:
    """All writes completed at P and said to be done, but they never landed: the request must not start."""
    with loopback(drop=1.0) as network:
        network.add_prefill()
        decode = network.add_decode()
        request = decode.request("r", 30)
        eventually(lambda: bool(network.channels[decode.node].of(Done)), 20)
        trace = decode.receiver.trace(request.request_id)
        assert trace is not None and trace.ready_at == 0.0 and request.request_id not in decode.tokens
        decode.receiver.cancel(request.request_id)
        decode.wait(request)


def test_repeated_messages_change_nothing() -> None:
    def twice(message: Any, deliver: Callable[[Any], None]) -> None:
        deliver(message)
        deliver(message)

    with loopback() as network:
        model = SteppedModel(lambda layer: None)
        network.add_prefill(model=model)
        decode = network.add_decode()
        for node in ("p0", "d0"):
            network.channels[node].tamper = twice  # type: ignore[index]
        p0 = network.channels["p0"]  # type: ignore[index]
        p0.tamper_meeting = lambda request, reply: [p0.meet_now(request, reply) for _ in range(2)]  # type: ignore[assignment]
        requests = [decode.request(f"r{tokens}", tokens) for tokens in (9, 17, 40)]
        decode.check(*requests)
        network.settle()
        exact(decode, *requests)
        assert sum(tokens for _, tokens in model.batches) == 8 + 16 + 39  # each prompt was computed once


def test_writes_start_while_the_forward_pass_runs() -> None:
    """Layer 0's writes have completed before layer 1 is computed."""
    gate = LayerGate(1)
    with loopback() as network:
        prefill = network.add_prefill(model=SteppedModel(gate))
        decode = network.add_decode()
        request = decode.request("r", 17)  # one chunk of two pages
        gate.wait()
        eventually(lambda: prefill.transport.stats()["writes_completed"] == 2, 20)
        assert decode.transport.immediates.waiting == 1
        gate.open.set()
        decode.check(request)
        exact(decode, request)
        trace = decode.receiver.trace(request.request_id)
        assert trace is not None and trace.timings is not None
        assert trace.timings.layers[0].completed_at < trace.timings.computed_at


def test_armed_before_asked() -> None:
    with loopback() as network:
        network.add_prefill()
        decode = network.add_decode()
        armed: list[int] = []

        def look(message: Any, deliver: Callable[[Any], None]) -> None:
            if isinstance(message, HandoffRequest):
                armed.append(decode.transport.immediates.received(message.imm))  # KeyError unless armed
            deliver(message)

        network.channels["p0"].tamper = look  # type: ignore[index]
        request = decode.request("r", 20)
        decode.check(request)
        assert armed == [0]


def test_window_is_respected() -> None:
    with loopback(delay_s=(0.001, 0.004)) as network:
        gate = LayerGate(0)
        prefill = network.add_prefill(model=SteppedModel(gate))
        decode = network.add_decode(window=2)
        request = decode.request("r", 120)
        gate.wait()
        link = next(iter(prefill.sender._peers._met.values())).link
        gate.open.set()
        seen = set()
        while request.request_id not in decode.ended:
            seen.add(link.in_flight)
        assert max(seen) == 2
        decode.check(request)
        exact(decode, request)


def test_late_immediates_are_counted_as_late() -> None:
    with loopback() as network:
        prefill = network.add_prefill()
        decode = network.add_decode()
        request = decode.request("r", 20)
        decode.check(request)
        network.settle()
        peer = next(iter(prefill.sender._peers._met.values()))
        message = network.channels["p0"].of(HandoffRequest)[0]  # type: ignore[index]
        peer.link.immediate(peer.request.regions[0].descriptor, message.imm)
        eventually(lambda: decode.transport.immediates.late == 1, 20)
        again = decode.request("again", 20)
        decode.check(again)
        network.settle()


def test_one_token_needs_no_handoff() -> None:
    with loopback() as network:
        network.add_prefill()
        decode = network.add_decode()
        request = decode.request("r", 1)
        decode.check(request)
        assert not network.channels["p0"].sent  # type: ignore[index]
        network.settle()


def test_jobs_wait_their_turn_while_pages_are_short() -> None:
    with loopback() as network:
        network.add_prefill(kv_cache_tokens=64)
        decode = network.add_decode(kv_cache_tokens=96)
        requests = [decode.request(f"r{n}", 10 + 3 * n) for n in range(12)]
        decode.check(*requests)
        network.settle()


def test_a_request_as_large_as_the_pool_follows_another() -> None:
    """Nothing more is freed after the first has ended: whoever waits must notice all the same."""
    with loopback() as network:
        network.add_prefill()
        decode = network.add_decode(kv_cache_tokens=64)
        requests = [decode.request("small", 30), decode.request("large", 64 - 1)]
        decode.wait(*requests)
        decode.check(requests[0])
        assert decode.ended[requests[1].request_id].finish is FinishReason.LENGTH
        network.settle()


def test_preempted_requests_come_back_and_stream_nothing_twice() -> None:
    with loopback() as network:
        network.add_prefill()
        decode = network.add_decode(kv_cache_tokens=96)
        requests = [decode.request(f"r{n}", 10, max_tokens=50) for n in range(4)]
        decode.check(*requests)
        assert decode.engine.stats().preemptions > 0
        assert len(network.channels["p0"].of(HandoffRequest)) > len(requests)  # type: ignore[index]
        network.settle()


def test_a_prompt_beyond_the_prefill_nodes_pool_is_refused() -> None:
    with loopback() as network:
        network.add_prefill(kv_cache_tokens=40)
        decode = network.add_decode()
        requests = [decode.request("large", 60), decode.request("small", 20)]
        assert "needs 8 pages, p0 has 5 (raise engine.kv_cache_tokens there)" in decode.error_of(requests[0])
        decode.check(requests[1])
        assert len(network.channels["d0"].of(Reject)) == 1  # type: ignore[index]
        assert decode.receiver.failures["rejected"] == 1
        network.settle()


def test_a_prompt_beyond_the_decode_nodes_pool_is_refused() -> None:
    with loopback() as network:
        network.add_prefill()
        decode = network.add_decode(kv_cache_tokens=40)
        assert "needs 8 pages, this node has 5" in decode.error_of(decode.request("large", 60))
        network.settle()
