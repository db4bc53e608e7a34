"""A link over several NICs: real tcp, with addresses of the loopback interface as NICs; verbs where there are NICs."""

from __future__ import annotations

import ctypes
import threading
from functools import partial

import numpy as np
import pytest

from tests.transport.pair import eventually, memory_of
from transport.api import PagedWrite, SingleWrite, make_imm
from transport.errors import FabricError, TransportError
from transport.fabric import abi
from transport.fabric.endpoint import Endpoint
from transport.topology import read_topology

TIMEOUT_S = 20.0
IMM = make_imm(5, 1)
EINVAL = 22
ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
VERBS = "verbs;ofi_rxm"
_READ = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Sides:
    """A sender and a receiver of `here` and `there` NICs, connected both ways."""

    def __init__(self, opened, here, there, blocks=120, block_bytes=4096, window=32):
        self.sender, self.receiver = opened(here), opened(there)
        self.blocks, self.block_bytes = blocks, block_bytes
        rng = np.random.default_rng(0)
        self.source_bytes = rng.integers(1, 255, (blocks, block_bytes), dtype=np.uint8)
        self.target_bytes = np.zeros_like(self.source_bytes)
        self.messages, self.answers, self.gates = [], [], []
        self.link = self.sender.open_link(self.answers.append)
        self.remote = self.receiver.open_link(self.messages.append)
        self.link.connect(self.remote.address, window=window, name="receiver")
        self.remote.connect(self.link.address, window=window, name="sender")
        self.source = self.sender.register(memory_of(self.source_bytes))
        self.target = self.remote.expose(memory_of(self.target_bytes)).descriptor

    def paged(self, imm=IMM, index=None):
        index = np.arange(self.blocks) if index is None else index
        size = self.block_bytes
        return self.link.write_paged(PagedWrite(self.source, self.target, size, 0, size, index, 0, size, index, imm))

    def expect(self, imm, count):
        full = threading.Event()
        self.receiver.immediates.arm(imm, count, lambda _: full.set())
        return full

    def hold(self):
        """Stops the receiver's worker until the event that it returns is set."""
        self.gates.append(threading.Event())
        self.receiver._worker.inbox.send(self.gates[-1].wait)
        return self.gates[-1]

    def close(self):
        for gate in self.gates:
            gate.set()
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def make_sides(open_engine):
    made = []

    def make(provider, *args, **kwargs):
        names = ADDRESSES if provider == "tcp" else tuple(nic.name for nic in read_topology().nics)
        options = {} if provider == "tcp" else {"spin": False}

        def opened(count):
            if count > len(names):
                pytest.skip(f"{provider} has {len(names)} NICs here, this test needs {count}")
            return open_engine(provider, nics=tuple(names[:count]), **options)()

        made.append(Sides(opened, *args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(params=["tcp", pytest.param(VERBS, marks=pytest.mark.slow)])
def any_sides(request, make_sides):
    return partial(make_sides, request.param)


@pytest.fixture
def sides(make_sides):
    """Over tcp: libfabric's verbs does not survive what these tests do to a queue."""
    return partial(make_sides, "tcp")


def break_queue(engine, lane):
    """From now on the lane's completion queue cannot be read: what a NIC that dies looks like. Keep what it returns."""
    read = _READ(lambda *_: -EINVAL)

    def replace():
        lane.poster.read = ctypes.cast(read, ctypes.c_void_p).value
        engine._worker._watch()

    engine._worker.inbox.call(replace)
    return read


@pytest.mark.parametrize(("here", "there"), [(2, 2), (3, 2), (1, 2), (2, 3), (3, 1)])
def test_every_nic_carries_its_share_and_every_byte_arrives(here, there, any_sides):
    pair = any_sides(here, there)
    assert len(pair.remote.address.names) == there == len(pair.target.keys)
    full = pair.expect(IMM, 6 * pair.blocks)
    for _ in range(6):
        assert pair.paged().wait(TIMEOUT_S)
    assert full.wait(TIMEOUT_S) and (pair.target_bytes == pair.source_bytes).all()
    shares = pair.sender.nic_stats()
    assert len(shares) == here and sum(shares.values()) == 6 * pair.blocks == pair.link.posted
    assert max(shares.values()) - min(shares.values()) <= pair.blocks
    assert pair.link.error is None and pair.link.lost_paths == ()


def test_a_single_write_in_parts_is_spread(any_sides):
    pair = any_sides(2, 2)
    length = pair.source_bytes.nbytes - 5
    full = pair.expect(IMM, 7)
    transfer = pair.link.write(SingleWrite(pair.source, pair.target, length, 5, 5, IMM, parts=7))
    assert transfer.wait(TIMEOUT_S) and full.wait(TIMEOUT_S) and transfer.posted == 7
    assert (pair.target_bytes.ravel()[5:] == pair.source_bytes.ravel()[5:]).all()
    assert sorted(pair.sender.nic_stats().values()) == [3, 4]
    assert pair.sender.stats()["bytes_completed"] == length


def test_a_window_below_the_number_of_nics_is_kept(any_sides):
    pair = any_sides(3, 3, blocks=512, window=1)
    transfer, most = pair.paged(), 0
    while not transfer.done:
        most = max(most, pair.link.in_flight)
    assert most <= 1 and transfer.completed == pair.blocks


def test_a_nic_that_dies_is_taken_out_and_the_rest_goes_on(sides):
    pair = sides(2, 2, window=8)
    full = pair.expect(IMM, pair.blocks)
    assert pair.paged().wait(TIMEOUT_S) and full.wait(TIMEOUT_S)
    lane = pair.link._end.lanes[1]
    kept = break_queue(pair.sender, lane)
    eventually(lambda: lane.closed)
    assert len(pair.link.lost_paths) == pair.sender.stats()["paths_lost"] == 1
    assert "127.0.0.2" in pair.link.lost_paths[0] and "fi_cq_read" in pair.link.lost_paths[0]
    assert pair.link.error is None
    pair.target_bytes[:] = 0
    again = pair.expect(make_imm(6, 1), pair.blocks)
    before = pair.sender.nic_stats()
    transfer = pair.paged(make_imm(6, 1))
    assert transfer.wait(TIMEOUT_S) and transfer.error is None and again.wait(TIMEOUT_S)
    assert (pair.target_bytes == pair.source_bytes).all()
    after = pair.sender.nic_stats()
    assert after["127.0.0.2"] == before["127.0.0.2"] and after["127.0.0.1"] == before["127.0.0.1"] + pair.blocks
    assert kept is not None


def test_what_was_in_flight_on_a_dead_nic_fails_and_what_was_queued_is_dealt_again(sides):
    pair = sides(2, 2, blocks=6, block_bytes=16 << 20, window=2)
    assert all(pair.link.immediate(pair.target, IMM).wait(TIMEOUT_S) for _ in range(2))
    gate = pair.hold()
    hit = pair.paged()
    eventually(lambda: hit.posted == 2)
    behind = pair.paged(make_imm(6, 1))
    full = pair.expect(make_imm(6, 1), pair.blocks)
    lane = pair.link._end.lanes[0]
    kept = break_queue(pair.sender, lane)
    eventually(lambda: lane.closed)
    gate.set()
    assert hit.wait(TIMEOUT_S) and isinstance(hit.error, FabricError) and hit.error.nic == "127.0.0.1"
    assert hit.completed <= hit.posted <= hit.total and hit.completed < hit.total
    assert behind.wait(TIMEOUT_S) and behind.error is None and behind.completed == pair.blocks
    assert full.wait(TIMEOUT_S) and (pair.target_bytes == pair.source_bytes).all()
    assert pair.link.error is None and pair.link.in_flight == 0 and kept is not None


def test_the_last_nic_that_dies_breaks_the_link(sides):
    pair = sides(2, 2)
    kept = [break_queue(pair.sender, lane) for lane in pair.link._end.lanes]
    eventually(lambda: pair.link.error is not None)
    transfer = pair.paged()
    assert transfer.wait(TIMEOUT_S) and transfer.error is pair.link.error and transfer.posted == 0
    assert isinstance(transfer.error, FabricError) and len(pair.link.lost_paths) == 2 and kept
    assert pair.sender.error is None and pair.sender.stats()["links_open"] == 0


def test_a_receiver_is_broken_only_when_all_its_nics_are(sides):
    pair = sides(1, 2)
    kept = [break_queue(pair.receiver, pair.remote._end.lanes[0])]
    eventually(lambda: pair.remote._end.lanes[0].closed)
    assert pair.remote.error is None
    kept.append(break_queue(pair.receiver, pair.remote._end.lanes[1]))
    eventually(lambda: pair.remote.error is not None)
    assert "fi_cq_read" in str(pair.remote.error) and kept


@pytest.mark.parametrize("dying", ["sender", "receiver"])
def test_messages_survive_a_dead_nic(dying, sides):
    pair = sides(2, 2)
    engine, link = (pair.sender, pair.link) if dying == "sender" else (pair.receiver, pair.remote)
    for number in range(2000):
        pair.link.send(b"%d" % number)
        pair.remote.send(b"-%d" % number)
        if number == 1000:
            kept = break_queue(engine, link._end.lanes[0])
    eventually(lambda: len(pair.messages) == len(pair.answers) == 2000)
    assert [int(message) for message in pair.messages] == list(range(2000))
    assert [-int(message) for message in pair.answers] == list(range(2000))
    assert link._end.lanes[0].closed and pair.link.error is None and kept is not None


def test_a_message_that_was_lost_with_a_nic_comes_again_unasked(sides):
    """The receiver's NIC takes it to the grave: nothing fails at the sender, and it sends no more."""
    pair = sides(2, 2)
    pair.link.send(b"first")
    pair.remote.send(b"first")
    eventually(lambda: pair.messages and pair.answers)
    gate, lane = pair.hold(), pair.remote._end.lanes[0]
    pair.link.send(b"second")
    kept = _READ(lambda *_: -EINVAL)
    lane.poster.read = ctypes.cast(kept, ctypes.c_void_p).value
    eventually(lambda: not pair.link._end.busy)
    gate.set()
    eventually(lambda: pair.messages == [b"first", b"second"])
    assert lane.closed and pair.link.error is None


def test_a_damaged_fragment_breaks_its_link_only(sides, monkeypatch):
    pair = sides(2, 2)
    monkeypatch.setattr(pair.link._end.talk.flow, "next", lambda: b"\xff" * 100)
    pair.link._end.talk.flow._tell_now = True
    with pytest.raises(TransportError):
        eventually(lambda: pair.link.send(b""))
    eventually(lambda: pair.remote.error is not None)
    assert "damaged" in str(pair.remote.error) and pair.receiver.error is None and pair.sender.error is None


def test_a_nic_that_cannot_be_opened_is_left_out(sides, monkeypatch, caplog):
    pair = sides(2, 2)
    opened = Endpoint.__init__

    def refuse(endpoint, domain):
        if domain.nic == "127.0.0.1":
            raise domain.error("fi_endpoint", -abi.FI_ENODATA)
        opened(endpoint, domain)

    monkeypatch.setattr(Endpoint, "__init__", refuse)
    link = pair.sender.open_link()
    assert len(link.address.names) == 1 and link.address.rails == pair.link.address.rails[1:]
    assert "does without 127.0.0.1" in caplog.text
    assert len(link.expose(memory_of(pair.target_bytes)).descriptor.keys) == 1
    monkeypatch.setattr(Endpoint, "__init__", lambda _, domain: (_ for _ in ()).throw(domain.error("fi_endpoint", -5)))
    with pytest.raises(FabricError, match="fi_endpoint"):
        pair.sender.open_link()


def test_regions_exposed_after_a_nic_died_keep_the_order_of_the_address(sides):
    pair = sides(1, 2)
    kept = break_queue(pair.receiver, pair.remote._end.lanes[0])
    eventually(lambda: pair.remote._end.lanes[0].closed)
    descriptor = pair.remote.expose(memory_of(pair.target_bytes)).descriptor
    assert len(descriptor.keys) == 2 and descriptor.keys[0] == bytes(8) != descriptor.keys[1]
    assert kept is not None
