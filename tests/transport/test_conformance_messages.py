"""What every transport promises of two-sided messages, tried on each of them."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from tests.transport.pair import TIMEOUT_S, eventually, memory_of
from transport.api import MAX_MESSAGE_BYTES, SingleWrite, make_imm
from transport.errors import BacklogFull, LinkClosed, MessageTooLarge, NotConnected

IMM = make_imm(3, 9)


def test_messages_arrive_in_order_and_each_once_both_ways(pair):
    draw = random.Random(5)
    sent = [draw.randbytes(draw.choice((0, 1, 30, 4000, 4096, 9000))) for _ in range(300)]
    for n, message in enumerate(sent):
        pair.link.send(message)
        pair.remote.send(sent[-1 - n])
    eventually(lambda: len(pair.there) >= len(sent) and len(pair.here) >= len(sent))
    assert pair.there == sent and pair.here == sent[::-1]
    for stats in (pair.sender.stats(), pair.receiver.stats()):
        assert (stats["messages_sent"], stats["messages_received"]) == (300, 300)


def test_messages_of_a_mebibyte(pair):
    sent = [np.random.default_rng(n).bytes((1 << 20) + n) for n in range(3)]
    for message in sent:
        pair.link.send(message)
        pair.remote.send(message)
    eventually(lambda: len(pair.there) == len(pair.here) == 3)
    assert pair.there == sent and pair.here == sent


def test_an_empty_message_is_one(pair):
    pair.link.send(b"")
    eventually(lambda: pair.there == [b""])


def test_a_message_is_taken_when_it_is_sent(pair):
    message = bytearray(b"first")
    pair.link.send(message)
    message[:] = b"other"
    eventually(lambda: pair.there == [b"first"])
    assert type(pair.there[0]) is bytes


def test_messages_and_writes_do_not_hinder_each_other(make_pair, full):
    pair = make_pair(blocks=4096, block_bytes=1024, window=8)
    landed = full()
    pair.receiver.immediates.arm(IMM, 4096, landed)
    pair.paged(IMM)
    for n in range(200):
        pair.link.send(n.to_bytes(2, "little"))
    eventually(lambda: len(pair.there) == 200)
    assert landed.wait() and pair.there == [n.to_bytes(2, "little") for n in range(200)]
    assert (pair.target_bytes == pair.source_bytes).all()


def test_a_link_for_messages_only(pair):
    link, remote = pair.connect(window=0)
    target = remote.expose(memory_of(pair.target_bytes)).descriptor
    link.send(b"hello")
    remote.send(b"and back")
    eventually(lambda: pair.there == [b"hello"] and pair.here == [b"and back"])
    with pytest.raises(NotConnected, match="messages only"):
        link.write(SingleWrite(pair.source, target, 8, 0, 0, IMM))
    assert link.quiesce(TIMEOUT_S) == link.posted == 0


def test_messages_go_to_the_link_that_they_were_sent_to(pair):
    came = []
    other, remote = pair.sender.open_link(came.append), pair.receiver.open_link(pair.there.append)
    other.connect(remote.address, window=1)
    remote.connect(other.address, window=0)
    pair.remote.send(b"first link")
    remote.send(b"second link")
    eventually(lambda: pair.here == [b"first link"] and came == [b"second link"])


def test_a_message_nobody_wants_is_dropped(pair):
    deaf, remote = pair.sender.open_link(), pair.receiver.open_link(pair.there.append)
    deaf.connect(remote.address, window=1)
    remote.connect(deaf.address, window=0)
    for _ in range(100):
        remote.send(b"hello?")
    deaf.send(b"I cannot hear you")
    eventually(lambda: pair.there == [b"I cannot hear you"] and pair.sender.stats()["messages_received"] == 100)
    assert deaf.error is None and not pair.here


def test_a_message_callback_that_raises_harms_nobody(pair, caplog):
    def fault(message):
        came.append(message)
        raise RuntimeError("on purpose")

    came = []
    link, remote = pair.sender.open_link(fault), pair.receiver.open_link(pair.there.append)
    link.connect(remote.address, window=1)
    remote.connect(link.address, window=0)
    remote.send(b"one")
    remote.send(b"two")
    eventually(lambda: came == [b"one", b"two"])
    link.send(b"still here")
    eventually(lambda: pair.there == [b"still here"])
    assert "on purpose" in caplog.text and pair.sender.error is None


def test_a_message_callback_may_answer_and_write(pair, full):
    landed, threads = full(), []
    pair.receiver.immediates.arm(IMM, 1, landed)

    def answer(message):
        threads.append(threading.current_thread().name)
        link.send(b"got " + message)
        link.write(SingleWrite(pair.source, target, 64, 0, 0, IMM))

    link, remote = pair.sender.open_link(answer), pair.receiver.open_link(pair.there.append)
    link.connect(remote.address, window=4)
    remote.connect(link.address, window=0)
    target = remote.expose(memory_of(pair.target_bytes)).descriptor
    remote.send(b"this")
    eventually(lambda: pair.there == [b"got this"])
    assert landed.wait() and threads[0].startswith("transport")


def test_a_link_may_be_closed_from_a_message_callback(pair):
    closed, heard = threading.Event(), []

    def close(message):
        heard.append(message)
        link.close()
        closed.set()

    link, remote = pair.sender.open_link(close), pair.receiver.open_link()
    link.connect(remote.address, window=1)
    remote.connect(link.address, window=0)
    remote.send(b"go away")
    remote.send(b"never heard")
    assert closed.wait(TIMEOUT_S)
    with pytest.raises(LinkClosed):
        link.send(b"hello?")
    pair.link.send(b"others go on")
    eventually(lambda: pair.there == [b"others go on"])
    assert heard == [b"go away"]


def test_no_message_is_heard_after_close(pair):
    heard = []
    link, remote = pair.sender.open_link(heard.append), pair.receiver.open_link()
    link.connect(remote.address, window=1)
    remote.connect(link.address, window=0)
    for n in range(500):
        remote.send(bytes([n % 256]) * 500)
    eventually(lambda: heard)
    link.close()
    then = list(heard)
    assert then == [bytes([n % 256]) * 500 for n in range(len(then))]
    pair.remote.send(b"others go on")
    eventually(lambda: pair.here == [b"others go on"])
    assert heard == then


def test_faults_of_who_sends_are_named(pair):
    with pytest.raises(NotConnected, match="connect it before"):
        pair.sender.open_link().send(b"to whom?")
    with pytest.raises(MessageTooLarge, match="use a write"):
        pair.link.send(bytes(MAX_MESSAGE_BYTES + 1))
    pair.link.close()
    with pytest.raises(LinkClosed):
        pair.link.send(b"too late")


def test_a_peer_that_takes_no_messages_fills_the_backlog_and_no_more(pair, full):
    """It has not connected, so it gives no credit back."""
    link, remote = pair.sender.open_link(), pair.receiver.open_link()
    link.connect(remote.address, window=4)
    message = bytes(4 << 20)
    with pytest.raises(BacklogFull, match="wait for a peer"):
        for _ in range(40):
            link.send(message)
    landed = full()
    pair.receiver.immediates.arm(IMM, 1, landed)
    target = remote.expose(memory_of(pair.target_bytes)).descriptor
    link.write(SingleWrite(pair.source, target, 64, 0, 0, IMM))
    assert landed.wait(), "writes go on"
    link.close()
