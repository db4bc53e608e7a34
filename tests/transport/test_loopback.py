"""What the loopback transport adds to the promises that test_conformance.py tries."""

from __future__ import annotations

import time

import numpy as np
import pytest

from transport.api import Memory, PagedWrite, Transport, make_imm
from transport.errors import LinkClosed, PeerLost, TransportError, TransportFailed
from transport.loopback import LoopbackNet, LoopbackTransport

IMM = make_imm(1, 1)
BLOCK, BLOCKS = 64, 200


class Setup:
    def __init__(self, **kwargs):
        self.net = LoopbackNet()
        self.sender: Transport = LoopbackTransport(self.net, **kwargs)
        self.receiver: Transport = LoopbackTransport(self.net)
        self.source = np.repeat(np.arange(1, BLOCKS + 1, dtype=np.uint8)[:, None], BLOCK, axis=1).copy()
        self.target = np.zeros_like(self.source)
        self.region = self.sender.register(Memory(int(self.source.ctypes.data), self.source.nbytes))
        self.link, self.remote = self.sender.open_link(), self.receiver.open_link()
        self.descriptor = self.remote.expose(Memory(int(self.target.ctypes.data), self.target.nbytes)).descriptor
        self.link.connect(self.remote.address, window=32)

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
        s.sender._land_due = lambda: 1 / 0
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
