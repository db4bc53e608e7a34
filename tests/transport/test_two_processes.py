"""What holds when the other side is another process: revocation, and a peer that is killed."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from transport.api import Memory, PagedWrite, make_imm
from transport.errors import LinkClosed, PeerLost
from transport.fabric.leftovers import remove_leftovers

TIMEOUT_S = 20.0
BLOCK, BLOCKS = 16384, 64
PROVIDERS = [
    "tcp", "ucx", "shm", "sockets",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("tcp;ofi_rxm", "verbs;ofi_rxm")),
]  # fmt: skip


def _eventually(condition, timeout_s=TIMEOUT_S):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not come to be in time"
        time.sleep(0.005)


def _unused(_):
    raise AssertionError("must not be called")


class Receiver:
    """This process: a link of its own, with memory of its own, towards one writer process that is open already."""

    def __init__(self, engine, peer, provider, slot):
        self.memory = np.zeros(BLOCK * BLOCKS, np.uint8)
        self.imm = make_imm(slot, 1)
        self.engine, self.peer = engine, peer
        self.link = engine.open_link()
        descriptor = self.link.expose(Memory(int(self.memory.ctypes.data), self.memory.nbytes)).descriptor
        engine.immediates.arm(self.imm, 1 << 40, _unused)
        peer.ask("stream", self.link.address, descriptor, BLOCK, BLOCKS, self.imm)

    @property
    def received(self):
        return self.engine.immediates.received(self.imm)

    def wait_for(self, count):
        deadline = time.monotonic() + TIMEOUT_S
        while self.received <= count:
            assert time.monotonic() < deadline, (
                f"{self.received} came, {self.engine.immediates.late} late; here: {self.link.error}; "
                f"at the writer: {self.peer.ask('last_error')}, {self.peer.ask('stats')}"
            )
            time.sleep(0.005)


def _opened(provider, peers, count):
    """Processes that start side by side, before any of them keeps the cores busy.

    They only write, and may do without the compiled loops, which take seconds to load.
    """
    started = [peers() for _ in range(count)]
    for peer in started:
        peer.ask("open", provider, "ctypes")
    return started


@pytest.mark.parametrize("provider", PROVIDERS)
def test_after_close_nothing_lands_and_others_go_on(provider, open_engine, peers):
    engine = open_engine(provider)()
    with engine:
        cut, other = (Receiver(engine, peer, provider, 1 + n) for n, peer in enumerate(_opened(provider, peers, 2)))
        for receiver in (cut, other):
            receiver.wait_for(4 * BLOCKS)
        cut.link.close()
        bytes_then, received_then, late_then = cut.memory.copy(), cut.received, engine.immediates.late
        other_then = other.received
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            assert (cut.memory == bytes_then).all()
            time.sleep(0.01)
        assert cut.received == received_then and engine.immediates.late == late_then
        # The memory is the receiver's own again.
        cut.memory[:] = 0xAB
        other.wait_for(other_then + 4 * BLOCKS)
        assert (cut.memory == 0xAB).all()
        counts = cut.peer.ask("stop")
        assert all(done and completed <= posted for posted, completed, done in counts)
        other.peer.ask("stop")
        other.link.close()
        assert (cut.memory == 0xAB).all()


@pytest.mark.parametrize("provider", ["tcp", "ucx"])
def test_a_writer_learns_that_it_was_cut_off(provider, open_engine, peers):
    engine = open_engine(provider)()
    with engine:
        cut = Receiver(engine, *_opened(provider, peers, 1), provider, 1)
        cut.wait_for(BLOCKS)
        cut.link.close()
        _eventually(lambda: cut.peer.ask("last_error") is not None)
        assert cut.peer.ask("last_error").startswith("PeerLost")
        assert "towards receiver" in cut.peer.ask("last_error")
        cut.peer.ask("stop")


def _sending(engine, peer, provider):
    """A transfer to another process that is under way, and never ends on its own."""
    peer.ask("open", provider, "ctypes")
    handle, address = peer.ask("open_link")
    descriptor = peer.ask("expose", handle, BLOCK * BLOCKS)
    source = np.ones(BLOCK * BLOCKS, np.uint8)
    region = engine.register(Memory(int(source.ctypes.data), source.nbytes))
    link = engine.open_link()
    link.connect(address, window=16, name="the dead one")
    index = np.random.default_rng(0).integers(0, BLOCKS, 1_000_000)
    done = threading.Event()
    write = PagedWrite(region, descriptor, BLOCK, 0, BLOCK, index, 0, BLOCK, index, make_imm(1, 1))
    transfer = link.write_paged(write, on_done=lambda _: done.set())
    _eventually(lambda: transfer.completed > BLOCKS)
    return link, transfer, done, source


@pytest.mark.parametrize("provider", PROVIDERS)
def test_peer_killed_while_writing_to_it(provider, open_engine, peers):
    engine = open_engine(provider)()
    with engine:
        peer = peers()
        link, transfer, done, _source = _sending(engine, peer, provider)
        peer.kill()
        if provider == "shm":
            assert remove_leftovers(peer.pid) == 1 and remove_leftovers(peer.pid) == 0
            # It never reports: the caller learns of the death elsewhere and closes the link.
            assert not transfer.wait(0.3)
            link.close()
            assert isinstance(transfer.error, LinkClosed)
        else:
            assert transfer.wait(TIMEOUT_S)
            assert isinstance(transfer.error, PeerLost) and "the dead one" in str(transfer.error)
        assert transfer.done and done.wait(TIMEOUT_S)
        assert transfer.completed <= transfer.posted < transfer.total
        assert link.in_flight == 0
        link.close()
        # The engine is as good as new.
        again, transfer, _, _source = _sending(engine, peers(), provider)
        transfer.cancel()
        assert transfer.wait(TIMEOUT_S) and transfer.completed == transfer.posted
        again.close()


@pytest.mark.parametrize("provider", ["tcp", "ucx"])
def test_peer_that_is_not_there_is_lost_after_the_stall_timeout(provider, open_engine, peers):
    engine = open_engine(provider)()
    with engine:
        peer = peers()
        peer.ask("open", provider, "ctypes")
        handle, address = peer.ask("open_link")
        descriptor = peer.ask("expose", handle, BLOCK)
        peer.kill()
        link = engine.open_link()
        link.connect(address, window=1, name="nobody")
        transfer = link.immediate(descriptor, make_imm(1, 1))
        assert transfer.wait(TIMEOUT_S)
        assert isinstance(transfer.error, PeerLost) and transfer.completed == 0
