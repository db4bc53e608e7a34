"""What the worker of a `TransferEngine` does when something fails that must not: nobody is left waiting for it.

The engines are real; each test puts one fault into one of them. All of it is above the providers: tcp stands for them.
"""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import pytest

from transport.api import Memory, SingleWrite, make_imm
from transport.engine import TransferEngine
from transport.errors import FabricError, LinkClosed, PeerLost, TransportError, TransportFailed
from transport.fabric import abi, calls

TIMEOUT_S = 20.0
IMM = make_imm(3, 9)
EINVAL = 22
_READ = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _eventually(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "did not come to be in time"
        time.sleep(0.002)


def _in_time(function):
    """Its result, or its exception; fails if it does not return."""
    results = []

    def run():
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "it blocks its caller"
    return results[0]


def _fault(*_, **__):
    raise RuntimeError("on purpose")


def _break_queue(engine, link, code):
    """From now on reading the link's completion queue returns `code`."""
    read = _READ(lambda *_: code)

    def replace():
        link._end.lanes[0].poster.read = ctypes.cast(read, ctypes.c_void_p).value
        engine._worker._watch()

    engine._worker.inbox.call(replace)
    return read


class Stuck:
    """A receiver whose worker does not turn, and a sender with one fully posted transfer in flight to it."""

    def __init__(self, sender, receiver):
        self.sender, self.receiver = sender, receiver
        self.bytes = np.zeros((2, 32 << 20), np.uint8)
        memories = [Memory(int(row.ctypes.data), row.nbytes) for row in self.bytes]
        self.link, self.remote = sender.open_link(), receiver.open_link()
        self.link.connect(self.remote.address, window=16, name="receiver")
        self.source, self.target = sender.register(memories[0]), self.remote.expose(memories[1]).descriptor
        assert self.link.immediate(self.target, IMM).wait(TIMEOUT_S)
        self.gate = threading.Event()
        receiver._worker.inbox.send(self.gate.wait)
        self.done = []
        self.transfer = self.write()
        _eventually(lambda: self.transfer.posted == 1)

    def write(self):
        write = SingleWrite(self.source, self.target, self.bytes.shape[1], 0, 0, IMM)
        return self.link.write(write, on_done=self.done.append)


@pytest.fixture
def engines(open_engine):
    made = [open_engine("tcp")() for _ in range(2)]
    yield made
    for engine in made:
        _in_time(engine.close)


@pytest.fixture
def stuck(engines):
    made = Stuck(*engines)
    yield made
    made.gate.set()


@pytest.mark.parametrize(
    "step",
    [
        "begin_close",
        "outgoing.abandon",
        "lane._drain",
        "lane.endpoint.close_ep",
        "lane.endpoint.close",
        "lane.mailbox.close",
    ],
)
def test_closing_ends_whatever_fails_in_it(step, engines, monkeypatch, caplog):
    link = engines[0].open_link()
    lane = link._end.lanes[0]
    *path, name = step.split(".")
    owner = lane if path[:1] == ["lane"] else link._end
    for part in path[path[:1] == ["lane"] :]:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, name, _fault)
    assert _in_time(link.close) is None
    monkeypatch.undo()
    assert "on purpose" in caplog.text and engines[0].stats()["links_open"] == 0 and engines[0].error is None
    if name == "close_ep":
        assert "may still write" in str(link.error)
        lane.endpoint.close_ep()
    _in_time(engines[0].open_link).close()


def test_closing_a_lingering_link_ends_too(stuck, monkeypatch):
    worker, end = stuck.sender._worker, stuck.link._end
    monkeypatch.setattr(end, "begin_close", lambda: True)
    monkeypatch.setattr(end.outgoing, "abandon", _fault)
    worker.inbox.call(lambda: setattr(end.outgoing, "in_flight", 0))
    assert _in_time(stuck.link.close) is None and stuck.sender.error is None
    assert _in_time(stuck.sender.open_link).error is None


@pytest.mark.parametrize("code", [-EINVAL, -abi.FI_EAVAIL])
def test_a_broken_queue_ends_its_link_and_costs_nothing(code, stuck):
    """The second code announces errors that are never handed out."""
    other, beyond = stuck.sender.open_link(), stuck.sender.open_link()
    other.connect(beyond.address, window=1)
    kept = _break_queue(stuck.sender, stuck.link, code)
    assert stuck.transfer.wait(TIMEOUT_S)
    assert isinstance(stuck.transfer.error, FabricError) and stuck.transfer.error is stuck.link.error
    assert stuck.link.error.code == (EINVAL if code == -EINVAL else abi.FI_EAGAIN)
    assert (stuck.transfer.posted, stuck.transfer.completed, stuck.link.in_flight) == (1, 0, 0)
    _eventually(lambda: stuck.done == [stuck.transfer])
    assert stuck.sender.stats()["writes_failed"] == 1
    assert isinstance(_in_time(lambda: stuck.link.expose(stuck.source.memory)), LinkClosed)
    after = stuck.write()
    assert after.wait(TIMEOUT_S) and after.error is stuck.link.error and after.posted == 0
    start = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - start < 0.15
    # The engine and its other links go on.
    target = beyond.expose(stuck.source.memory).descriptor
    assert other.immediate(target, IMM).wait(TIMEOUT_S) and other.error is None and stuck.sender.error is None
    assert _in_time(stuck.link.close) is None and stuck.link.error is stuck.transfer.error
    assert kept is not None


def test_a_receiver_polls_its_link_and_the_sender_hears_of_it(stuck):
    stuck.gate.set()
    assert stuck.transfer.wait(TIMEOUT_S) and stuck.remote.error is None
    kept = _break_queue(stuck.receiver, stuck.remote, -EINVAL)
    _eventually(lambda: stuck.remote.error is not None)
    assert "fi_cq_read" in str(stuck.remote.error)
    transfer = stuck.write()
    assert transfer.wait(TIMEOUT_S) and isinstance(transfer.error, PeerLost) and stuck.link.error is transfer.error
    assert kept is not None


def test_a_lane_that_raises_is_broken_once(stuck, monkeypatch, caplog):
    monkeypatch.setattr(stuck.link._end.lanes[0], "_run", _fault)
    assert stuck.write().wait(TIMEOUT_S) and stuck.transfer.wait(TIMEOUT_S)
    assert isinstance(stuck.transfer.error, TransportError) and "on purpose" in str(stuck.link.error)
    time.sleep(0.05)
    assert caplog.text.count("failed and is closed") == 1 and stuck.sender.error is None


@pytest.mark.parametrize("fault", [RuntimeError("on purpose"), SystemExit("on purpose")])
def test_a_worker_that_fails_leaves_nobody_waiting(fault, stuck, monkeypatch, caplog):
    worker, held, entered = stuck.sender._worker, threading.Event(), threading.Event()

    def fail():
        entered.set()
        held.wait()
        raise fault

    monkeypatch.setattr(worker, "_wait", fail)
    worker.inbox.nudge()
    assert entered.wait(TIMEOUT_S)
    waiting = []
    asking = [lambda: stuck.sender.open_link(), lambda: stuck.sender.register(stuck.source.memory), stuck.link.close]
    threads = [threading.Thread(target=lambda a=a: waiting.append(_in_time(a))) for a in asking]
    late = stuck.write()
    for thread in threads:
        thread.start()
    _eventually(lambda: len(worker.inbox._functions) == 1 + len(threads))
    held.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert [type(answer) for answer in waiting].count(TransportFailed) == 2 and waiting.count(None) == 1
    assert stuck.transfer.wait(TIMEOUT_S) and late.wait(TIMEOUT_S)
    assert stuck.sender.error is stuck.transfer.error is late.error is stuck.link.error
    assert "on purpose" in str(stuck.sender.error)
    assert (stuck.transfer.posted, stuck.transfer.completed, late.posted) == (1, 0, 0)
    _eventually(lambda: len(stuck.done) == 2)
    assert isinstance(_in_time(stuck.sender.open_link), TransportFailed)
    assert isinstance(_in_time(lambda: stuck.sender.unregister(stuck.source)), TransportFailed)
    assert _in_time(stuck.link.close) is None and _in_time(stuck.sender.close) is None
    assert stuck.sender.stats()["links_open"] == 0 and "worker thread failed" in caplog.text


def test_a_callback_that_exits_does_not_end_the_worker(engines):
    link = engines[0].open_link()
    link.connect(engines[1].open_link().address, window=1)
    link.close()
    with pytest.raises(LinkClosed):
        link.expose(Memory(0, 1))

    def leave(_):
        raise SystemExit

    one, two = engines[0].open_link(), engines[1].open_link()
    one.connect(two.address, window=1)
    target = two.expose(Memory(int(np.zeros(8, np.uint8).ctypes.data), 8)).descriptor
    assert one.immediate(target, IMM, on_done=leave).wait(TIMEOUT_S)
    assert one.immediate(target, IMM).wait(TIMEOUT_S) and engines[0].error is None


def test_arming_while_the_worker_goes_to_rest_is_not_missed(engines, monkeypatch):
    """A counter that is armed just before the rest begins must make it a short one."""
    engine: TransferEngine = engines[0]
    worker, link, rests, armed = engine._worker, engine.open_link(), [], threading.Event()
    begin_rest, pause = worker.inbox.begin_rest, worker._pause

    def watched_pause():
        rests.append(pause())
        return rests[-1]

    def arm_first():
        if not armed.is_set():
            rests.clear()
            engine.immediates.arm(IMM, 1, lambda _: None)
            armed.set()
        return begin_rest()

    monkeypatch.setattr(worker._rest, "sure", False)
    monkeypatch.setattr(worker, "_pause", watched_pause)
    monkeypatch.setattr(worker.inbox, "begin_rest", arm_first)
    worker.inbox.send(lambda: None)
    assert armed.wait(TIMEOUT_S)
    _eventually(lambda: rests)
    assert rests[0].longest_ns <= 200_000 and link.error is None


def test_a_region_that_does_not_close_is_not_taken_for_revoked(engines, monkeypatch):
    engine = engines[0]
    link, sound = engine.open_link(), engine.open_link()
    memory = np.zeros(4096, np.uint8)
    link.expose(Memory(int(memory.ctypes.data), memory.nbytes))
    assert not link.revoked
    close = calls.close
    refused = link._end.lanes[0]._regions[0].handle
    monkeypatch.setattr(calls, "close", lambda pointer: -16 if pointer == refused else close(pointer))
    link.close()
    sound.close()
    assert not link.revoked and "may still write" in str(link.error)
    assert sound.revoked and sound.error is None
    close(refused)
