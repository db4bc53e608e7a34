"""What the loopback transport adds to the promises that test_conformance.py tries."""

from __future__ import annotations

import time

import numpy as np
import pytest

from transport.api import Memory, PagedWrite, Transport, make_imm
from transport.errors import (
    FabricError,
    LinkClosed,
    PeerLost,
    ProviderUnavailable,
    TransportError,
    TransportFailed,
)
from transport.loopback import LoopbackNet, LoopbackTransport
from transport.loopback_copy import _interpreted, bind_copy

IMM = make_imm(1, 1)
BLOCK, BLOCKS = 64, 200


class Setup:
    def __init__(self, nics_there=1, revokes=True, **kwargs):
        self.net = LoopbackNet()
        self.sender: Transport = LoopbackTransport(self.net, **kwargs)
        self.receiver: Transport = LoopbackTransport(self.net, nics=nics_there, revokes=revokes)
        self.source = np.repeat(np.arange(1, BLOCKS + 1, dtype=np.uint8)[:, None], BLOCK, axis=1).copy()
        self.target = np.zeros_like(self.source)
        self.region = self.sender.register(Memory(int(self.source.ctypes.data), self.source.nbytes))
        self.there, self.here = [], []
        self.link, self.remote = self.sender.open_link(self.here.append), self.receiver.open_link(self.there.append)
        self.descriptor = self.remote.expose(Memory(int(self.target.ctypes.data), self.target.nbytes)).descriptor
        self.link.connect(self.remote.address, window=32)
        self.remote.connect(self.link.address, window=0)

    def write(self, blocks=BLOCKS):
        order = np.arange(blocks)
        return self.link.write_paged(
            PagedWrite(self.region, self.descriptor, BLOCK, 0, BLOCK, order, 0, BLOCK, order, IMM)
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sender.close()
        self.receiver.close()


def _order(seed):
    """In which order the blocks land: each write overwrites the same target block, so the last one stays."""
    last = []
    for _ in range(6):
        with Setup(seed=seed) as s:
            index = np.arange(32)
            s.link.write_paged(
                PagedWrite(s.region, s.descriptor, BLOCK, 0, BLOCK, index, 0, BLOCK, np.zeros(32, np.int64), IMM)
            ).wait(10)
            last.append(int(s.target[0, 0]))
    return last


def test_in_order_without_a_seed_and_shuffled_with_one():
    assert _order(None) == [32] * 6
    shuffled = _order(3)
    assert shuffled == _order(3) and set(shuffled) != {32}


def test_drop_completes_here_and_lands_nowhere():
    with Setup(seed=1, drop=0.5) as s:
        s.receiver.immediates.arm(IMM, BLOCKS, lambda _: None)
        transfer = s.write()
        assert transfer.wait(10) and transfer.completed == BLOCKS
        s.remote.close()
        landed = int(s.target.any(axis=1).sum())
        assert 0 < landed < BLOCKS and s.receiver.immediates.received(IMM) <= landed


def test_closed_receiver_is_a_lost_peer():
    with Setup(delay_s=(0.001, 0.005)) as s:
        transfer = s.write()
        s.remote.close()
        then = s.target.copy()
        assert transfer.wait(10) and isinstance(transfer.error, PeerLost)
        assert (s.target == then).all()


def test_silent_receiver_is_noticed_by_nobody():
    with Setup() as s:
        s.remote.go_silent()
        transfer = s.write()
        assert not transfer.wait(0.1) and transfer.posted == 32
        s.link.close()
        assert isinstance(transfer.error, LinkClosed) and transfer.posted == 32 and transfer.completed == 0


def test_a_link_that_breaks_down_says_so_to_both_sides():
    with Setup(delay_s=(0.001, 0.005)) as s:
        transfer, fault = s.write(), TransportError("the queue is broken")
        assert s.remote.error is None and s.link.error is None
        s.remote.break_down(fault)
        assert s.remote.error is fault
        with pytest.raises(LinkClosed, match="the queue is broken"):
            s.remote.expose(Memory(int(s.target.ctypes.data), s.target.nbytes))
        assert transfer.wait(10) and isinstance(s.link.error, PeerLost)
        s.remote.close()
        s.link.close()
        assert s.remote.error is fault and isinstance(s.link.error, PeerLost)


def test_a_worker_that_fails_leaves_nobody_waiting(caplog):
    with Setup(delay_s=(60.0, 60.0)) as s:
        transfer = s.write()
        while not transfer.posted:
            time.sleep(0.001)
        s.sender._worker.turn = lambda: 1 / 0
        s.sender.inbox.send(lambda: None)
        assert transfer.wait(10) and transfer.posted == 32 and transfer.completed == 0
        assert isinstance(transfer.error, TransportFailed) and s.link.error is transfer.error is s.sender.error
        with pytest.raises(TransportFailed, match="ZeroDivisionError"):
            s.sender.open_link()
        with pytest.raises(TransportFailed):
            s.write()
        s.link.close()
        s.sender.close()
    assert "worker thread failed" in caplog.text


def test_nets_are_apart():
    with Setup() as s, pytest.raises(AssertionError):
        other = LoopbackTransport(LoopbackNet())
        try:
            link = other.open_link()
            link.connect(s.remote.address, window=1)
            transfer = link.immediate(s.descriptor, IMM)
            assert transfer.wait(10)
            assert transfer.error is None
        finally:
            other.close()


def _until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "did not come to be in time"
        time.sleep(0.001)


@pytest.mark.parametrize(("here", "there"), [(2, 2), (3, 2), (1, 3)])
def test_every_nic_of_both_sides_carries_its_share(here, there):
    with Setup(nics=here, nics_there=there) as s:
        assert s.link.address.rails == tuple(range(here)) and len(s.descriptor.keys) == there
        assert len(set(s.descriptor.keys)) == there
        assert s.write().wait(10) and (s.target == s.source).all()
        assert {path.pair[0] for path in s.link.paths} == set(range(here))
        assert {path.pair[1] for path in s.link.paths} == set(range(there))


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_nic_that_dies_takes_what_was_in_flight_there_with_it_and_no_more(side):
    with Setup(nics=2, nics_there=2, seed=4, delay_s=(0.0, 0.002)) as s:
        first, later = s.write(), s.write()
        _until(lambda: first.completed > 10)
        getattr(s, side).fail_nic(1)
        assert first.wait(10) and later.wait(10)
        assert s.link.error is None and len(s.link.lost_paths) == 1 and "1" in s.link.lost_paths[0]
        assert s.sender.stats()["paths_lost"] == 1
        for transfer in (first, later):
            assert transfer.posted == transfer.completed + transfer.failed
            assert (transfer.error is None) == (transfer.completed == transfer.total)
            assert transfer.error is None or isinstance(transfer.error, FabricError)
        again = s.write()
        assert again.wait(10) and again.error is None and (s.target == s.source).all()


def test_the_last_nic_breaks_the_link_of_either_side():
    with Setup(nics=2, nics_there=1) as s:
        s.sender.fail_nic(0)
        assert s.write().wait(10) and s.link.error is None
        s.receiver.fail_nic(0)
        assert s.remote.error is not None, "nothing can come any more"
        transfer = s.write()
        assert transfer.wait(10) and transfer.error is s.link.error and isinstance(s.link.error, PeerLost)
        with pytest.raises(ProviderUnavailable, match="every NIC"):
            s.receiver.open_link()
        late = s.sender.open_link()
        assert late.address.rails == (1,) and len(late.address.names) == 1
        with pytest.raises(ValueError, match="no NIC 2"):
            s.sender.fail_nic(2)


def test_messages_survive_a_nic_of_either_side():
    with Setup(nics=2, nics_there=2, seed=6, delay_s=(0.0, 0.003)) as s:
        sent = [bytes([n]) * 3000 for n in range(200)]
        for n, message in enumerate(sent):
            s.link.send(message)
            s.remote.send(message)
            if n == 60:
                s.sender.fail_nic(0)
        _until(lambda: len(s.there) >= 200 and len(s.here) >= 200)
        assert s.there == sent and s.here == sent


def test_messages_to_a_closed_link_break_the_senders():
    with Setup() as s:
        s.remote.close()
        s.link.send(b"anybody?")
        _until(lambda: s.link.error is not None)
        assert isinstance(s.link.error, PeerLost)
        with pytest.raises(LinkClosed, match="broken"):
            s.link.send(b"hello?")


def test_a_transport_that_does_not_revoke_may_write_after_the_close():
    with Setup(revokes=False, delay_s=(0.05, 0.05)) as s:
        assert s.sender.revokes and not s.receiver.revokes
        s.receiver.immediates.arm(IMM, BLOCKS, lambda _: None)
        transfer = s.write()
        _until(lambda: transfer.posted == 32)
        s.remote.close()
        s.target[:] = 0
        assert transfer.wait(10) and isinstance(transfer.error, PeerLost)
        assert s.target.any() and s.receiver.immediates.received(IMM) == s.receiver.immediates.late == 0


def test_copying_compiled_and_interpreted_is_the_same():
    draw = np.random.default_rng(1)
    source, index = draw.integers(0, 256, 5000, dtype=np.uint8), draw.permutation(40)
    results = []
    for copy in (bind_copy(), _interpreted):
        target = np.zeros(5000, np.uint8)
        first = int(target.ctypes.data)
        whole = copy(96, int(source.ctypes.data), 100, index, first, 110, index[::-1].copy(), first, first + 5000)
        cut = copy(96, int(source.ctypes.data), 100, index, first, 110, np.arange(40), first, first + 1000)
        below = copy(96, int(source.ctypes.data), 100, index, first - 1, 110, np.arange(40), first, first + 5000)
        results.append((whole, cut, below, target.tobytes()))
    assert results[0] == results[1] and results[0][:3] == (40, 9, 0)
