"""Two nodes that cannot work together, or not yet."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pdserve.messenger.wire import (
    PROTOCOL_VERSION,
    MeetReply,
    MeetRequest,
)
from pdserve.types import NodeId
from policies.layout import KvLayout
from tests.pdserve.messenger.pair import (
    QUICK,
    Network,
    loopback,
)

P0, P1, D0 = NodeId("p0"), NodeId("p1"), NodeId("d0")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("fingerprint", "another", "fingerprint differs: another at p0 (toy), toy at d0 (toy)"),
        ("dtype", "bf16", "dtype differs: bf16 at p0 (toy), fp32 at d0 (toy)"),
        ("page_size", 16, "page_size differs: 16 at p0 (toy), 8 at d0 (toy)"),
        ("protocol", 7, f"protocol differs: 7 at p0 (toy), {PROTOCOL_VERSION} at d0 (toy)"),
        ("kv_layout", KvLayout.NHD, f"kv_layout differs: {KvLayout.NHD} at p0 (toy), {KvLayout.HND} at d0 (toy)"),
    ],
)
@pytest.mark.parametrize("who", ["prefill refuses", "decode refuses"])
def test_meeting_refused(network: Network, field: str, value: object, said: str, who: str) -> None:
    """Never garbage: the request ends with what differs, and both values."""
    prefill = network.add_prefill()
    decode = network.add_decode()
    card = dataclasses.replace(prefill.card, **{field: value})  # type: ignore[arg-type]
    if who == "prefill refuses":
        prefill.sender._peers._card = card
    else:
        network.channels[P0].tamper_meeting = lambda request, reply: reply(MeetReply(card, request.address))
    assert said in decode.error_of(decode.request("r", 30))
    network.settle()
    assert decode.transport.stats()["links_open"] == 0 == prefill.transport.stats()["links_open"]


def test_no_common_provider(network: Network) -> None:
    network.add_prefill()
    decode = network.add_decode()
    network.cards[P0] = dataclasses.replace(network.cards[P0], providers=("tcp",))
    error = decode.error_of(decode.request("r", 30))
    assert "provider 'loopback' is configured, but p0 cannot open it; it has: tcp" in error


def test_meeting_never_answered() -> None:
    with loopback(handoff=QUICK) as network:
        network.add_prefill().die()
        decode = network.add_decode()
        error = decode.error_of(decode.request("r", 30))
        assert "could not meet p0: it did not answer a meeting in time; no other prefill node became ready" in error
        assert decode.transport.stats()["links_open"] == 0
        network.settle()


def test_meeting_fails_with_an_error(network: Network) -> None:
    """A node that cannot be reached is not held against the request's attempts: it may just be starting."""
    network.add_prefill()
    decode = network.add_decode()
    p0 = network.channels[P0]
    failures = [ConnectionError("no such actor")] * 2

    def unreachable(request: MeetRequest, reply: Any) -> None:
        if failures:
            reply(failures.pop())
        else:
            p0.meet_now(request, reply)

    p0.tamper_meeting = unreachable
    decode.check(decode.request("r", 30))
    network.settle()


@pytest.mark.parametrize(("window", "granted"), [(64, 64), (400, 100)])
def test_a_window_stays_below_the_receive_queue_of_its_link(
    monkeypatch: pytest.MonkeyPatch, network: Network, window: int, granted: int
) -> None:
    """However many prefill nodes there are: each writes into a queue of its own."""
    monkeypatch.setattr("transport.loopback._MAX_WINDOW", 100)
    decode = network.add_decode(window=window)
    for number in range(5):
        network.add_prefill(f"p{number}")
    decode.check(*[decode.request(f"r{number}", 20, f"p{number}") for number in range(5)])
    met = [network.channels[NodeId(f"p{number}")].of(MeetRequest) for number in range(5)]
    assert [[meeting.window for meeting in meetings] for meetings in met] == [[granted]] * 5
    network.settle()
