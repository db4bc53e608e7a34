"""Transports that cannot revoke: what a peer may still write to is held until its writer is known to be done."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from pdserve.kv.pool import PagePool
from pdserve.messenger import held, receiver
from pdserve.messenger.held import HeldMemory
from pdserve.messenger.slots import SlotTable
from pdserve.messenger.wire import MeetReply, MeetRequest
from pdserve.types import Incarnation, NodeId
from tests.pdserve.engine.toy import eventually
from tests.pdserve.messenger.pair import PATIENCE_S, QUICK, Network, PrefillSide, loopback
from tests.pdserve.messenger.stepped import LayerGate, SteppedModel

P0, P1 = NodeId("p0"), NodeId("p1")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Stands for the prefill node's, whose end is what the decode node waits for."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def answered_by(network: Network, node: NodeId, change: Callable[[MeetReply], MeetReply]) -> None:
    """That prefill node's replies to meetings, changed."""
    channel = network.channels[node]

    def meet(request: MeetRequest, reply: Any) -> None:
        channel.meet_now(request, lambda answer: reply(change(answer)))

    channel.tamper_meeting = meet


def end(prefill: PrefillSide, gate: LayerGate) -> None:
    """Before the decode node, whose memory it may still write to."""
    gate.open.set()
    prefill.close()


@pytest.mark.parametrize("revokes", [True, False])
@pytest.mark.parametrize("state", ["receiving", "cancelling"])
def test_memory_is_held_until_the_process_has_ended(
    revokes: bool, state: str, process: subprocess.Popen[bytes], impatient: None
) -> None:
    """The request fails over at once; where late writes may land, the pages wait for the end of their writer."""
    with loopback(revokes=revokes, handoff=QUICK.model_copy(update={"transfer_timeout_s": 60.0})) as network:
        gate = LayerGate(1)
        prefill = network.add_prefill(model=SteppedModel(gate))
        prefill.sender._peers._card = prefill.card = replace(prefill.card, pid=process.pid)
        network.add_prefill("p1")
        decode = network.add_decode()
        request = decode.request("r", 60)
        gate.wait()
        if state == "cancelling":
            network.channels[P0].mute()
            decode.receiver.cancel(request.request_id)
            eventually(lambda: decode.receiver.quarantined_handoffs == 1)
        network.down.add(P0)
        network.channels[P0].mute()
        decode.receiver.peer_lost(P0, "it seems hung")
        if state == "receiving":
            decode.check(request)
        if not revokes:
            eventually(lambda: decode.receiver.handoffs == decode.receiver.quarantined_handoffs == 1)
            assert decode.pool.quarantined_pages == 8  # for 59 tokens
            decode.check(decode.request("again", 30, "p1"))
            assert decode.pool.quarantined_pages == 8
            process.kill()
        eventually(lambda: decode.at_rest, PATIENCE_S)
        end(prefill, gate)


def test_a_process_that_ended_first_holds_nothing(process: subprocess.Popen[bytes]) -> None:
    with loopback(revokes=False) as network:
        gate = LayerGate(1)
        prefill = network.add_prefill(model=SteppedModel(gate))
        prefill.sender._peers._card = prefill.card = replace(prefill.card, pid=process.pid)
        network.add_prefill("p1")
        decode = network.add_decode()
        request = decode.request("r", 60)
        gate.wait()
        network.down.add(P0)
        process.kill()
        decode.check(request)
        eventually(lambda: decode.at_rest, PATIENCE_S)
        end(prefill, gate)


def test_a_node_that_is_met_again_is_still_watched(process: subprocess.Popen[bytes]) -> None:
    """What is held since an earlier meeting, of which a link did not close, comes back with the end of the process."""
    with loopback(revokes=False) as network:
        gate = LayerGate(1)
        prefill = network.add_prefill(model=SteppedModel(gate))
        prefill.sender._peers._card = prefill.card = replace(prefill.card, pid=process.pid)
        decode = network.add_decode()
        answered_by(network, P0, lambda reply: replace(reply, closed_through=0))
        request = decode.request("r", 60)
        gate.wait()
        decode.receiver.peer_lost(P0, "it seems hung")
        gate.open.set()
        decode.check(request)  # from the same node, met again
        assert decode.receiver.quarantined_handoffs == 1
        process.kill()
        eventually(lambda: decode.at_rest, PATIENCE_S)
        end(prefill, gate)


# ------------------------------------------------ a prefill node that closes its side


def test_a_node_that_is_met_again_has_closed_its_side() -> None:
    """On whatever host it is: then its late writes have ended, and what was held for them comes back."""
    with loopback(revokes=False) as network:
        gate = LayerGate(1)
        prefill = network.add_prefill(model=SteppedModel(gate))
        decode = network.add_decode()
        request = decode.request("r", 60)
        gate.wait()
        decode.receiver.peer_lost(P0, "it seems hung")
        eventually(lambda: decode.receiver.quarantined_handoffs == 1)
        gate.open.set()
        decode.check(request)  # from the same node, met again
        eventually(lambda: decode.at_rest, PATIENCE_S)
        first, second = network.channels[P0].of(MeetRequest)
        assert first.number < second.number
        network.settle()
        assert prefill.transport.stats()["links_open"] == 1


def test_who_may_still_write_is_met_again_although_nobody_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "ASK_AGAIN_S", 0.1)
    with loopback(revokes=False) as network:
        gate = LayerGate(1)
        network.add_prefill(model=SteppedModel(gate))
        network.add_prefill("p1")
        decode = network.add_decode()
        request = decode.request("r", 60)
        gate.wait()
        network.down.add(P0)
        decode.receiver.peer_lost(P0, "it seems hung")
        decode.check(request)
        assert decode.receiver.trace(request.request_id).prefill == P1  # type: ignore[union-attr]
        eventually(lambda: decode.at_rest, PATIENCE_S)
        assert len(network.channels[P0].of(MeetRequest)) == 2
        gate.open.set()


def test_a_successor_says_nothing_about_its_predecessor(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process: the old one may still write, so its end alone frees what it was given."""
    monkeypatch.setattr(receiver, "ASK_AGAIN_S", 0.05)
    monkeypatch.setattr(held, "SETTLE_S", 0.0)
    with loopback(revokes=False) as network:
        gate = LayerGate(1)
        old = network.add_prefill(model=SteppedModel(gate))
        old.sender._peers._card = old.card = replace(old.card, pid=process.pid)
        decode = network.add_decode()
        request = decode.request("r", 60)
        gate.wait()
        network.add_prefill()
        decode.receiver.peer_replaced(P0, network.prefill[P0].card.incarnation)
        decode.check(request, decode.request("again", 30))
        assert decode.receiver.quarantined_handoffs == 1 and decode.pool.quarantined_pages == 8
        process.kill()
        eventually(lambda: decode.at_rest, PATIENCE_S)
        end(old, gate)


def test_a_link_that_did_not_close_is_told_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was for stays held, in later meetings too."""
    monkeypatch.setattr(held, "SETTLE_S", 0.0)
    with loopback(revokes=False) as network:
        replies: list[MeetReply] = []
        prefill = network.add_prefill()
        decode = network.add_decode()
        answered_by(network, P0, lambda reply: replies.append(reply) or reply)  # type: ignore[func-returns-value]
        for number in range(4):
            decode.check(decode.request(f"r{number}", 30))
            network.settle()
            if number == 1:
                (destination,) = prefill.sender._peers._met.values()
                prefill.sender._peers._met[decode.card.incarnation] = replace(
                    destination, link=_StuckLink(destination.link)
                )
            decode.receiver.peer_lost(P0, "it seemed so")
            eventually(lambda: not decode.receiver.met)
        met = [request.number for request in network.channels[P0].of(MeetRequest)]
        assert [reply.closed_through for reply in replies] == [met[0] - 1, met[1] - 1, met[1] - 1, met[1] - 1]


class _StuckLink:
    """One of which a step of the closing fails."""

    revoked = False

    def __init__(self, link: Any) -> None:
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


def test_held_memory_is_freed_by_meeting_and_settles_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, slots = PagePool(8), SlotTable(4)
    memory = HeldMemory(pool, slots)
    mine, other = Incarnation(1), Incarnation(2)
    for peer, meeting in ((mine, 3), (mine, 7), (other, 3)):
        pages = pool.allocate(2)
        pool.quarantine(pages)
        memory.hold(P0 if peer == mine else P1, peer, meeting, (pages, slots.take()))
    assert memory.peers == {P0: mine, P1: other}
    assert memory.closed(mine, 6, now=10.0) == 1
    memory.check(10.0 + held.SETTLE_S - 0.001)
    assert len(memory) == 3 and (pool.free_pages, slots.free) == (2, 1)
    memory.check(10.0 + held.SETTLE_S)
    assert len(memory) == 2 and (pool.free_pages, slots.free) == (4, 2)
    memory.closed(mine, 7, now=20.0)
    assert memory.peers == {P1: other}
    memory.release(mine)  # its process has ended: there is nothing to wait for
    memory.release(other)
    assert len(memory) == 0 and (pool.free_pages, slots.free) == (8, 4)
