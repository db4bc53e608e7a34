"""Messages by links, and links that lose a part or all."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from pdserve.config import TransportSettings
from pdserve.messenger.codec import encode
from pdserve.messenger.line import Intake
from pdserve.messenger.meeting import Transports
from pdserve.messenger.wire import Accept, Cancel, HandoffId, HandoffRequest, MeetReply, MeetRequest, NotMet, Quiesced
from pdserve.messenger.wires import find_wires, open_wire
from pdserve.types import Incarnation, NodeId
from tests.pdserve.engine.toy import eventually
from tests.pdserve.messenger.pair import (
    DecodeSide,
    Network,
    PrefillSide,
    loopback,
)
from transport.errors import BacklogFull, LibraryMissing, LinkClosed, TransportError

P0, P1, D0 = NodeId("p0"), NodeId("p1"), NodeId("d0")


def link_of(side: DecodeSide | PrefillSide) -> Any:
    """Towards the only peer."""
    if isinstance(side, DecodeSide):
        (peer,) = side.receiver._peers.all()
        return peer.link
    (destination,) = side.sender._peers._met.values()
    return destination.link


def met(network: Network) -> tuple[PrefillSide, DecodeSide]:
    prefill, decode = network.add_prefill(), network.add_decode()
    decode.check(decode.request("first", 30))
    network.settle()
    return prefill, decode


# ------------------------------------------------ messages


def test_only_meetings_go_aside_of_the_link(network: Network) -> None:
    prefill, decode = met(network)
    eventually(lambda: decode.transport.stats()["messages_received"] == 2)  # Accept and Done
    assert prefill.transport.stats()["messages_received"] == 1
    assert not network.channels[P0].aside and not network.channels[D0].aside
    assert len(network.channels[P0].of(MeetRequest)) == 1


@pytest.mark.parametrize("error", [BacklogFull("it takes none"), LinkClosed("closed"), TransportError("broken")])
def test_what_a_link_does_not_take_goes_aside(network: Network, error: TransportError) -> None:
    prefill, decode = met(network)
    link_of(prefill).refuse(error)
    link_of(decode).refuse(error)
    decode.check(decode.request("r", 30))
    network.settle()
    assert len(network.channels[P0].aside) == 1 and len(network.channels[D0].aside) == 2


def test_what_is_no_message_is_dropped_and_counted(network: Network) -> None:
    prefill, decode = met(network)
    request = network.channels[P0].of(HandoffRequest)[0]
    damaged = encode(request)[:-1]
    for wrong in (b"", b"junk", damaged, encode(request)):  # a request is nothing that is told to D
        link_of(prefill).link.send(wrong)
    link_of(decode).link.send(encode(Quiesced(request.id, Incarnation(1), 0, "")))
    decode.check(decode.request("r", 30))
    network.settle()
    assert decode.receiver.unreadable == 4 and prefill.sender.unreadable == 1


def test_what_was_dropped_is_told_with_its_sender(caplog: pytest.LogCaptureFixture) -> None:
    intake = Intake(Cancel)
    wanted = Cancel(HandoffId(Incarnation(1), 2), D0, Incarnation(3), Incarnation(4))
    assert intake.read(encode(wanted), "d0") == wanted
    assert intake.read(encode(Accept(wanted.id, Incarnation(3), 0)), "d0") is None
    assert "dropped what d0 has sent: Accept is nothing that a peer tells this side" in caplog.text


def test_a_reply_with_another_providers_address_refuses_the_meeting(network: Network) -> None:
    prefill, decode = network.add_prefill(), network.add_decode()
    p0 = network.channels[P0]

    def elsewhere(request: MeetRequest, reply: Any) -> None:
        reply(MeetReply(prefill.card, replace(request.address, provider="pigeon")))

    p0.tamper_meeting = elsewhere
    assert "provider 'pigeon'" in decode.error_of(decode.request("r", 30))
    assert decode.transport.stats()["links_open"] == 0


# ------------------------------------------------ a prefill node that closes its link


def test_a_prefill_node_that_closes_an_idle_link_says_so(network: Network) -> None:
    """No handoff is under way that could fail, and not every provider shows that a link was closed."""
    prefill, decode = met(network)
    prefill.sender._mail.post(
        lambda: prefill.sender._lose(decode.card.incarnation, "its writes do not complete", tell=True)
    )
    eventually(lambda: not decode.receiver.met)
    assert [message.id.number for message in network.channels[D0].of(NotMet)] == [
        network.channels[P0].of(MeetRequest)[0].number
    ]
    decode.check(decode.request("again", 30))
    assert len(network.channels[P0].of(MeetRequest)) == 2
    network.settle()


def test_what_is_said_of_an_earlier_meeting_ends_no_later_one(network: Network) -> None:
    prefill, decode = met(network)
    mine, earlier = prefill.card.incarnation, network.channels[P0].of(MeetRequest)[0].number
    decode.receiver.peer_lost(P0, "it seemed so")
    decode.check(decode.request("again", 30))
    for meeting in (HandoffId(decode.card.incarnation, earlier), HandoffId(Incarnation(77), earlier + 2)):
        decode.receiver.on_message(NotMet(meeting, mine, mine, "its writes do not complete"))
    decode.check(decode.request("more", 30))
    assert len(network.channels[P0].of(MeetRequest)) == 2
    network.settle()


def test_a_link_that_is_closed_before_the_reply_comes_is_not_used(network: Network) -> None:
    prefill, decode = network.add_prefill(), network.add_decode()
    kept: list[Any] = []
    p0 = network.channels[P0]
    p0.tamper_meeting = lambda request, reply: p0.meet_now(request, lambda answer: kept.append((reply, answer)))
    request = decode.request("r", 30)
    eventually(lambda: bool(kept))
    p0.tamper_meeting = None
    prefill.sender._mail.post(lambda: prefill.sender._lose(decode.card.incarnation, "it seemed so", tell=True))
    decode.check(request)  # by a second meeting
    reply, answer = kept[0]
    reply(answer)
    decode.check(decode.request("again", 30))
    assert len(p0.of(MeetRequest)) == 2
    network.settle()


def test_the_next_incarnation_of_a_decode_node_takes_the_place_of_the_last(network: Network) -> None:
    """An idle link shows nothing of its peer's end, and a peer on another host has no pidfd."""
    prefill, decode = met(network)
    decode.close()
    assert prefill.transport.stats()["links_open"] == 1
    successor = network.add_decode()
    successor.check(successor.request("r", 30))
    assert prefill.transport.stats()["links_open"] == 1
    assert list(prefill.sender._peers._met) == [successor.card.incarnation]
    network.settle()


# ------------------------------------------------ several NICs


def test_a_link_goes_on_without_a_nic(caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, counted, and costs no handoff; the last NIC ends the link."""
    with loopback(nics=2) as network, caplog.at_level(logging.WARNING, "pdserve.messenger.line"):
        prefill, decode = met(network)
        prefill.transport.fail_nic(0)  # type: ignore[attr-defined]
        eventually(lambda: "the link to d0 goes on without NIC 0" in caplog.text)
        decode.check(*[decode.request(f"r{n}", 30 + n) for n in range(4)])
        network.settle()
        assert len(network.channels[P0].of(MeetRequest)) == 1
        lost = prefill.transport.stats()["paths_lost"]
        assert 0 < lost == len([line for line in caplog.text.splitlines() if "to d0 goes on without" in line])


# ------------------------------------------------ what there is


def test_the_wire_is_told_when_it_is_opened(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pdserve.messenger.meeting"), loopback() as network:
        _, decode = met(network)
        assert isinstance(decode.transports, Transports)
        (wire,) = decode.transports.all()
        assert wire.transport.provider == "loopback" and wire.reason
        assert f"wire: {wire.transport.description}; " in caplog.text


def test_the_wires_of_this_machine() -> None:
    wires = find_wires(TransportSettings())
    assert "tcp" in wires.providers and set(wires.rdma) <= set(wires.providers)
    assert find_wires(TransportSettings(provider="ucx")).providers == ("ucx",)
    with pytest.raises(LibraryMissing, match=r"/no/such\.so"):
        find_wires(TransportSettings(libfabric="/no/such.so"))  # one that is named is not done without


def test_named_nics_do_not_keep_a_host_from_its_shared_memory() -> None:
    with open_wire(TransportSettings(nics=["127.0.0.1"]), "shm") as wire:  # type: ignore[attr-defined]
        assert wire.provider == "shm"


def test_a_wire_is_opened_with_what_the_settings_say() -> None:
    with pytest.raises(TransportError, match=r"203\.0\.113\.9"):
        open_wire(TransportSettings(nics=["203.0.113.9"]), "tcp")
    wire = open_wire(TransportSettings(nics=["127.0.0.1"]), "tcp")
    try:
        assert wire.provider == "tcp" and "127.0.0.1" in wire.description
    finally:
        wire.close()
