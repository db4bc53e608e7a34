"""What `TransferEngine` offers beyond the protocol: polling by the caller, a CPU for its worker, NICs by name."""

from __future__ import annotations

import os
import select
import threading
import time

import numpy as np
import pytest

from tests.transport.pair import eventually, memory_of
from transport.api import PagedWrite, SingleWrite, make_imm
from transport.doorbell import Doorbell, Ringer
from transport.engine import TransferEngine
from transport.errors import ProviderUnavailable, TransportError, TransportFailed

TIMEOUT_S = 20.0
IMM = make_imm(2, 1)


class Polled:
    """Two engines, and a link between them; the sender is polled by the test."""

    def __init__(self, open_engine):
        self.sender, self.receiver = open_engine("tcp")(), open_engine("tcp")()
        self.source_bytes = np.arange(256 * 64, dtype=np.uint8).reshape(64, 256)
        self.target_bytes = np.zeros_like(self.source_bytes)
        self.link, self.remote = self.sender.open_link(), self.receiver.open_link()
        self.link.connect(self.remote.address, window=8, name="receiver")
        self.source = self.sender.register(memory_of(self.source_bytes))
        self.target = self.remote.expose(memory_of(self.target_bytes)).descriptor

    def write(self, on_done=None):
        return self.link.write(SingleWrite(self.source, self.target, 256, 0, 0, IMM), on_done)


@pytest.fixture
def polled(open_engine):
    made = Polled(open_engine)
    yield made
    made.sender.close()
    made.receiver.close()


def _poll_until(poll, condition):
    eventually(lambda: poll() or condition())


def test_the_caller_takes_the_worker_s_place(polled):
    threads, index = [], np.arange(64)
    with polled.sender.polling() as poll:
        transfer = polled.write(lambda _: threads.append(threading.current_thread()))
        _poll_until(poll, lambda: transfer.done)
        paged = PagedWrite(polled.source, polled.target, 256, 0, 256, index, 0, 256, index, IMM)
        transfer = polled.link.write_paged(paged)
        _poll_until(poll, lambda: transfer.done and threads)
        again = [polled.link.write(SingleWrite(polled.source, polled.target, 256, 0, 0, IMM)) for _ in range(20)]
        assert polled.link.in_flight <= 8
        _poll_until(poll, lambda: all(each.done for each in again))
        assert polled.link.quiesce(0) == polled.link.posted == 85
    assert threads == [threading.current_thread()] and (polled.target_bytes == polled.source_bytes).all()
    # Afterwards the worker works again.
    transfer = polled.write(lambda _: threads.append(threading.current_thread()))
    assert transfer.wait(TIMEOUT_S)
    eventually(lambda: len(threads) == 2)
    assert threads[1].name == "transport-tcp"


def test_what_other_threads_ask_is_done_by_the_poller(polled):
    opened = []
    with polled.sender.polling() as poll:
        thread = threading.Thread(target=lambda: opened.append(polled.sender.open_link()))
        thread.start()
        _poll_until(poll, lambda: opened)
        opened[0].close()
    thread.join(TIMEOUT_S)
    assert polled.sender.stats()["links_open"] == 1


def test_who_polls_may_wait_for_immediates(polled):
    polled.receiver.immediates.arm(IMM, 100, lambda _: None)
    with polled.receiver.polling() as poll:
        assert not poll.wait(IMM, 1, 0.02)
        for _ in range(5):
            polled.write()
        assert poll.wait(IMM, 5, TIMEOUT_S) and polled.receiver.immediates.received(IMM) == 5
        with pytest.raises(KeyError, match="slot 77 is not armed"):
            poll.wait(make_imm(77, 1), 1)


def test_what_completes_while_the_caller_waits_has_completed_when_the_link_closes(polled):
    link, remote = polled.sender.open_link(), polled.receiver.open_link()
    link.connect(remote.address, window=8)
    remote.connect(link.address, window=8)
    here = np.zeros(4096, np.uint8)
    back = link.expose(memory_of(here)).descriptor
    there = remote.expose(memory_of(polled.target_bytes)).descriptor
    polled.sender.immediates.arm(IMM, 1 << 40, lambda _: None)
    with polled.sender.polling() as poll:
        for number in range(1, 9):
            polled.receiver.immediates.arm(make_imm(8, number), 1, lambda _: remote.immediate(back, IMM))
            transfer = link.write(SingleWrite(polled.source, there, 256, 0, 0, make_imm(8, number)))
            assert poll.wait(IMM, number, TIMEOUT_S)
            polled.receiver.immediates.disarm(make_imm(8, number))
        link.close()
        assert transfer.done and transfer.error is None and transfer.completed == link.posted / 8 == 1


def test_only_one_may_poll_and_none_may_close_meanwhile(polled):
    refused = []

    def also():
        try:
            with polled.sender.polling():
                pass
        except TransportError as error:
            refused.append(str(error))

    with polled.sender.polling():
        thread = threading.Thread(target=also)
        thread.start()
        thread.join(TIMEOUT_S)
        with pytest.raises(TransportError, match="while it is polled"):
            polled.sender.close()
    assert refused == ["another thread polls this transport already"]


def test_a_turn_that_fails_ends_the_transport(polled, monkeypatch):
    def fault(*_):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), polled.sender.polling() as poll:
        monkeypatch.setattr(polled.sender._worker, "_call_back", fault)
        poll()
    monkeypatch.undo()
    polled.sender._worker._thread.join(TIMEOUT_S)
    assert isinstance(polled.sender.error, TransportFailed) and "on purpose" in str(polled.sender.error)
    with pytest.raises(TransportFailed):
        polled.write()


def test_the_worker_is_kept_on_its_cpu():
    cpu = max(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    with TransferEngine("tcp", cpu=cpu) as engine:
        assert engine._worker.inbox.call(lambda: os.sched_getaffinity(0)) == {cpu}
    assert os.sched_getaffinity(0) == before
    with pytest.raises(ValueError, match=rf"cannot be kept on CPU 100000 .*allowed: .*{cpu}"):
        TransferEngine("tcp", cpu=100_000)


def test_nics_are_named_in_the_description_and_must_be_there():
    with TransferEngine("tcp", nics=("127.0.0.2", "127.0.0.3")) as engine:
        assert engine.nics == ("127.0.0.2", "127.0.0.3") and "127.0.0.2, 127.0.0.3" in engine.description
        assert engine.open_link().address.incarnation == engine.incarnation
    with pytest.raises(ProviderUnavailable, match=r"192\.0\.3\.99"):
        TransferEngine("tcp", nics=("192.0.3.99",))


def test_an_engine_that_spins_works_and_hears_what_is_asked(open_engine):
    with open_engine("tcp", spin=True)() as engine:
        link = engine.open_link()
        assert link.address.doorbell == b""
        link.close()


def test_a_doorbell_wakes_and_is_not_rung_too_often():
    bell = Doorbell()
    ringer = Ringer(bell.name)
    for _ in range(1000):
        ringer.ring()
    assert select.select([bell], [], [], TIMEOUT_S)[0]
    bell.answer()
    assert not select.select([bell], [], [], 0)[0]
    bell.close()
    eventually(lambda: ringer.ring() or not ringer.rings)  # nobody is there any more: it gives up
    assert not Ringer(b"").rings


def test_only_providers_that_do_not_wake_by_themselves_have_a_doorbell(open_engine):
    with open_engine("tcp")() as tcp, open_engine("shm")() as shm:
        assert tcp.open_link().address.doorbell == b"" != shm.open_link().address.doorbell


def test_a_link_that_a_message_closes_takes_no_other(open_engine):
    """Messages that had come with it are not handed over after the close."""
    sender, receiver = open_engine("tcp")(), open_engine("tcp")()
    taken = []

    def take(message):
        taken.append(message)
        remote.close()

    with sender, receiver:
        link, remote = sender.open_link(), receiver.open_link(take)
        link.connect(remote.address, window=1)
        remote.connect(link.address, window=0)
        hold = threading.Event()
        receiver._worker.inbox.send(hold.wait)
        for number in range(5):
            link.send(bytes([number]))
        time.sleep(0.2)
        hold.set()
        eventually(lambda: remote.revoked, 20)
        receiver._worker.inbox.call(lambda: None)
        assert taken == [b"\0"]
