"""Messages are lost, late or repeated; the pages stay safe, and nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.config import HandoffSettings
from pdserve.messenger.wire import (
    Accept,
    Cancel,
    HandoffRequest,
    MeetRequest,
    NotMet,
)
from pdserve.types import NodeId
from tests.pdserve.engine.toy import eventually
from tests.pdserve.messenger.pair import PATIENCE_S, QUICK, Network, loopback
from tests.pdserve.messenger.stepped import SteppedModel
from tests.pdserve.messenger.taps import Keep, drop

P0, P1, D0 = NodeId("p0"), NodeId("p1"), NodeId("d0")


@pytest.mark.parametrize("mute", ["request", "request and cancel", "everything"])
def test_no_answer_to_a_request(mute: str, impatient: None) -> None:
    with loopback(handoff=QUICK) as network:
        prefill = network.add_prefill("p0")
        network.add_prefill("p1")
        decode = network.add_decode()
        decode.check(decode.request("first", 9))  # they have met
        network.settle()
        kinds = {"request": (HandoffRequest,), "request and cancel": (HandoffRequest, Cancel)}
        if mute == "everything":
            prefill.die()
        else:
            network.channels[P0].tamper = drop(*kinds[mute])
        request = decode.request("r", 30)
        decode.check(request)
        trace = decode.receiver.trace(request.request_id)
        assert trace is not None and trace.prefill == P1
        network.settle()
        revoked = decode.receiver.failures["peer_lost"]
        assert revoked == (0 if mute == "request" else 1)


def test_a_late_accept_does_not_extend_a_cancels_patience(impatient: None) -> None:
    with loopback(handoff=HandoffSettings(request_timeout_s=0.2, failover_timeout_s=0.2)) as network:
        network.add_prefill(model=SteppedModel(LayerGateOnce()))
        decode = network.add_decode()
        network.channels[D0].tamper = keep = Keep(Accept)
        network.channels[P0].tamper = drop(Cancel)
        request = decode.request("r", 30)
        eventually(lambda: decode.receiver.quarantined_handoffs == 1, PATIENCE_S)
        keep.release()
        decode.wait(request)
        eventually(lambda: decode.at_rest, PATIENCE_S)  # and not after 600 s


class LayerGateOnce:
    """The first prefill step takes a while."""

    def __init__(self) -> None:
        self._first = True

    def __call__(self, layer: int) -> None:
        if self._first:
            self._first = False
            threading.Event().wait(1.0)


def test_a_request_from_before_the_last_meeting_is_not_carried_out(network: Network) -> None:
    """The decode node has revoked its pages in the meantime and given them to others."""
    model = SteppedModel(lambda layer: None)
    network.add_prefill(model=model)
    decode = network.add_decode()
    network.channels[P0].tamper = keep = Keep(HandoffRequest)
    late = decode.request("late", 30)
    keep.wait()
    decode.receiver.peer_lost(P0, "it seemed so")
    network.channels[P0].tamper = None
    decode.check(late)
    network.settle()
    computed = list(model.batches)
    keep.release()
    again = decode.request("again", 20)
    decode.check(again)
    assert sum(tokens for _, tokens in model.batches) == sum(tokens for _, tokens in computed) + 19
    assert decode.transport.immediates.late == 0
    network.settle()


def test_a_late_meeting_request_ends_no_later_meeting(network: Network) -> None:
    network.add_prefill()
    decode = network.add_decode()
    kept: list[tuple[Any, ...]] = []
    network.channels[P0].tamper_meeting = lambda *call: kept.append(call)
    first = decode.request("first", 30)
    eventually(lambda: bool(kept))
    decode.receiver.peer_lost(P0, "it seemed so")  # that meeting is given up
    network.channels[P0].tamper_meeting = None
    decode.check(first)
    answers: list[object] = []
    network.channels[P0].meet_now(kept[0][0], answers.append)
    decode.check(decode.request("second", 30))
    assert "is over" in str(answers) and len(network.channels[P0].of(MeetRequest)) == 2
    network.settle()


def test_a_late_refusal_ends_no_later_meeting(network: Network) -> None:
    """`NotMet` about a handoff that is long over."""
    prefill = network.add_prefill()
    decode = network.add_decode()
    decode.check(decode.request("first", 30))
    network.settle()
    over = network.channels[P0].of(HandoffRequest)[0].id
    mine = prefill.card.incarnation
    decode.receiver.on_message(NotMet(over, mine, mine, "this decode node has not met me"))
    decode.check(decode.request("second", 30))
    assert len(network.channels[P0].of(MeetRequest)) == 1
    network.settle()


def test_a_channel_that_raises_is_a_message_lost(impatient: None) -> None:
    patient = QUICK.model_copy(update={"failover_timeout_s": 30.0, "transfer_timeout_s": 30.0})
    with loopback(handoff=patient) as network:
        network.add_prefill("p0")
        network.add_prefill("p1")
        decode = network.add_decode()
        decode.check(decode.request("first", 9))

        def broken(message: Any, deliver: Callable[[Any], None]) -> None:
            raise OSError("no route")

        network.channels[P0].tamper = broken
        network.channels[D0].tamper = broken
        decode.check(decode.request("r", 30))
        network.settle()
