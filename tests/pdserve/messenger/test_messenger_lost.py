"""Nodes die, links break, messages are lost or late: the request fails over or says why, and nothing is lost."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

from pdserve.config import HandoffSettings
from pdserve.messenger.wire import (
    NotMet,
)
from pdserve.types import NodeId
from tests.pdserve.engine.toy import eventually, make_request
from tests.pdserve.messenger.pair import PATIENCE_S, QUICK, DecodeSide, Network, loopback
from tests.pdserve.messenger.stepped import LayerGate, SteppedModel
from transport.errors import BacklogFull, TransportError
from transport.open import open_transport

P0, P1, D0 = NodeId("p0"), NodeId("p1"), NodeId("d0")


def link_at(decode: DecodeSide, node: NodeId = P0) -> Any:
    peer = decode.receiver._peers.get(node)
    assert peer is not None and peer.link is not None
    return peer.link


@pytest.mark.parametrize("notice", ["peer_lost", "deadline"])
def test_prefill_node_dies_in_mid_transfer(notice: str, impatient: None) -> None:
    """The request fails over, with pages of its own; the tokens are the same."""
    settings = HandoffSettings(transfer_timeout_s=600.0 if notice == "peer_lost" else 1.0)
    with loopback(handoff=settings) as network:
        gate = LayerGate(1)
        dying = network.add_prefill("p0", model=SteppedModel(gate))
        network.add_prefill("p1")
        decode = network.add_decode()
        request = decode.request("r", 60)
        gate.wait()
        eventually(lambda: dying.transport.stats()["writes_completed"] == 2)
        dying.die()
        gate.open.set()
        if notice == "peer_lost":
            decode.receiver.peer_lost(P0, "its actor died")
        decode.check(request)
        trace = decode.receiver.trace(request.request_id)
        assert trace is not None and (trace.prefill, trace.attempt) == (P1, 2)
        network.settle()


def test_prefill_node_closes_in_mid_transfer(network: Network) -> None:
    """It says so, and nobody waits for a deadline."""
    gate = LayerGate(1)
    closing = network.add_prefill("p0", model=SteppedModel(gate))
    network.add_prefill("p1")
    decode = network.add_decode()
    request = decode.request("r", 60)
    gate.wait()
    network.down.add(P0)
    thread = threading.Thread(target=closing.close)
    thread.start()
    gate.open.set()
    decode.check(request)
    thread.join(PATIENCE_S)
    assert closing.pool.free_pages == closing.pool.total
    network.settle()


def test_the_only_prefill_node_dies() -> None:
    with loopback(handoff=QUICK) as network:
        gate = LayerGate(1)
        prefill = network.add_prefill(model=SteppedModel(gate))
        decode = network.add_decode()
        streaming = decode.request("streaming", 1, max_tokens=20)
        request = decode.request("r", 60)
        gate.wait()
        prefill.die()
        gate.open.set()
        decode.receiver.peer_lost(P0, "its actor died")
        assert decode.error_of(request) == (
            "prefill failed: p0 was lost: its actor died; no other prefill node became ready within 0.5 s"
        )
        decode.check(streaming)
        network.settle()
        network.add_prefill()  # the node was restarted: another incarnation
        again = decode.request("again", 60)
        decode.check(again)
        network.settle()


def test_a_request_for_one_node_only_goes_nowhere_else(network: Network) -> None:
    """A verification that could be rerouted would wait for the very readiness that it is to prove."""
    network.add_prefill("p1")
    decode = network.add_decode()
    request = make_request("r", 30, 4)
    decode.receiver.start(request, NodeId("unknown"), only_there=True)
    assert "could not meet unknown" in decode.error_of(request)
    assert decode.receiver.met == frozenset()
    decode.check(decode.request("other", 30, "p1"))
    assert decode.receiver.met == {network.prefill[P1].card.incarnation}
    network.settle()


def test_the_only_prefill_node_is_restarted_in_time(network: Network) -> None:
    gate = LayerGate(1)
    prefill = network.add_prefill(model=SteppedModel(gate))
    decode = network.add_decode()
    request = decode.request("r", 60)
    gate.wait()
    prefill.die()
    gate.open.set()
    decode.receiver.peer_lost(P0, "its actor died")
    eventually(lambda: decode.at_rest)
    network.add_prefill()
    decode.check(request)
    network.settle()


def test_a_new_incarnation_refuses_what_was_meant_for_its_predecessor(network: Network) -> None:
    """The decode node has not noticed the restart, and its link takes nothing: the answer to its request says so."""
    old = network.add_prefill()
    decode = network.add_decode()
    decode.check(decode.request("first", 30))
    network.settle()
    network.add_prefill()
    link_at(decode).refuse(BacklogFull("the peer takes none"))
    request = decode.request("r", 30)
    decode.check(request)
    refusals = network.channels[D0].of(NotMet)
    assert refusals[0].target == old.card.incarnation and refusals[0].reason == "my predecessor was meant"
    network.settle()


def test_reroute_fails_or_never_answers() -> None:
    with loopback(handoff=QUICK) as network:
        network.add_prefill().die()
        decode = network.add_decode()
        network.reroute = lambda *_: None  # type: ignore[method-assign]
        decode.receiver._parts = dataclasses.replace(decode.receiver._parts, reroute=network.reroute)
        assert "no other prefill node became ready within 0.5 s" in decode.error_of(decode.request("r", 30))

        def broken(*_: Any) -> None:
            raise RuntimeError("the scheduler is not there")

        decode.receiver._parts = dataclasses.replace(decode.receiver._parts, reroute=broken)
        assert "no other prefill node became ready within 0.5 s" in decode.error_of(decode.request("again", 30))
        network.settle()


def test_decode_node_lost_in_mid_transfer(network: Network) -> None:
    gate = LayerGate(1)
    prefill = network.add_prefill(model=SteppedModel(gate))
    lost, other = network.add_decode("d0"), network.add_decode("d1")
    lost.request("r", 60)
    gate.wait()
    link = next(iter(prefill.sender._peers._met.values())).link
    prefill.sender.peer_lost(lost.card.incarnation, "its actor died")
    request = other.request("other", 30)
    gate.open.set()
    other.check(request)
    eventually(lambda: prefill.sender.active == 0)
    assert prefill.pool.free_pages == prefill.pool.total
    assert link.in_flight == 0


def test_decode_node_falls_silent(impatient: None) -> None:
    """Its writes never complete, and nothing proves that it is dead: after a while the link is closed."""
    with loopback(handoff=HandoffSettings(transfer_timeout_s=0.5)) as network:
        gate = LayerGate(0)
        prefill = network.add_prefill(model=SteppedModel(gate))
        decode = network.add_decode()
        decode.request("r", 60)
        gate.wait()
        link = link_at(decode)
        link.go_silent()
        network.channels[P0].mute()
        network.channels[D0].mute()
        gate.open.set()
        eventually(lambda: prefill.transport.stats()["writes_posted"] > 0)
        eventually(lambda: prefill.sender.active == 0, PATIENCE_S)
        assert prefill.pool.free_pages == prefill.pool.total and prefill.transport.stats()["links_open"] == 0


def test_a_broken_link_is_replaced(network: Network) -> None:
    """A write is refused, which ends the link: the two meet again, and the same prefill node does it."""
    network.add_prefill()
    decode = network.add_decode()
    decode.check(decode.request("first", 30))
    network.settle()
    link_at(decode)._exposed.clear()
    request = decode.request("r", 30)
    decode.check(request)
    assert len(network.channels[D0].of(NotMet)) == 1
    trace = decode.receiver.trace(request.request_id)
    assert trace is not None and trace.attempt == 2
    network.settle()


def test_a_receiving_link_that_breaks_is_noticed() -> None:
    """The receiving side has no transfer to fail: it polls its links, revokes, and the request fails over."""
    with loopback() as network:
        gate = LayerGate(1)
        network.add_prefill("p0", model=SteppedModel(gate))
        network.add_prefill("p1")
        decode = network.add_decode()
        request = decode.request("r", 60)
        gate.wait()
        link_at(decode).break_down(TransportError("the completion queue has failed"))
        decode.check(request)
        gate.open.set()
        trace = decode.receiver.trace(request.request_id)
        assert trace is not None and trace.prefill == P1
        network.settle()


def test_a_broken_link_spares_other_peers() -> None:
    with loopback(handoff=HandoffSettings(transfer_timeout_s=60.0)) as network:
        gate = LayerGate(1)
        network.add_prefill("p0", model=SteppedModel(gate))
        network.add_prefill("p1")
        decode = network.add_decode()
        first, second = decode.request("first", 30, "p0"), decode.request("second", 30, "p1")
        decode.check(second)
        gate.wait()
        link_at(decode)._exposed.clear()
        gate.open.set()
        decode.check(first)
        assert decode.receiver._peers.get(P1) is not None and decode.receiver.failures["peer_lost"] == 1
        network.settle()


def test_writes_that_never_land(impatient: None) -> None:
    """They completed at the sender; the pages are safe only once the sender has been revoked."""
    with loopback(drop=1.0, handoff=QUICK) as network:
        network.add_prefill()
        decode = network.add_decode()
        request = decode.request("r", 30)
        eventually(lambda: decode.receiver.quarantined_handoffs == 1, PATIENCE_S)
        assert decode.pool.quarantined_pages == 4
        assert "no pages from p0 in time" in decode.error_of(request)
        network.settle()
        assert decode.receiver.failures["expired"] > 0 and decode.receiver.failures["peer_lost"] > 0


def test_killed_over_tcp(impatient: None) -> None:
    with Network(open_transport, "tcp", handoff=HandoffSettings(transfer_timeout_s=5.0)) as network:
        gate = LayerGate(1)
        dying = network.add_prefill("p0", model=SteppedModel(gate))
        network.add_prefill("p1")
        decode = network.add_decode()
        request = decode.request("r", 60)
        gate.wait()
        dying.die()
        gate.open.set()
        decode.receiver.peer_lost(P0, "its actor died")
        decode.check(request)
        network.settle()
