"""Processes killed in mid-transfer, again and again: whoever survives says so, frees everything and goes on."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

import numpy as np
import pytest

from tests.transport.pair import eventually, memory_of
from transport.api import PagedWrite, make_imm
from transport.errors import LinkClosed, PeerLost, TransportError
from transport.fabric.leftovers import remove_leftovers

pytestmark = pytest.mark.slow

KILLS = 20
DEADLINE_S = 15.0
"""The stall timeout of these tests is 2 s, and the cores are shared."""
BLOCK, BLOCKS = 16384, 64
IMM = make_imm(7, 1)
REPORTS = {"tcp": True, "tcp;ofi_rxm": True, "sockets": True, "ucx": True, "shm": False}
"""Whether writes towards a killed process fail by themselves."""


def _unused(_):
    raise AssertionError("must not be called")


class Outflow:
    """This process writes to another one, on and on."""

    def __init__(self, engine, peer, provider):
        peer.ask("open", provider, "ctypes")
        handle, address = peer.ask("open_link")
        descriptor = peer.ask("expose", handle, BLOCK * BLOCKS)
        self.engine = engine
        self.source = np.ones(BLOCK * BLOCKS, np.uint8)
        self.region = engine.register(memory_of(self.source))
        self.link = engine.open_link()
        self.link.connect(address, window=16, name=f"process {peer.pid}")
        index = np.tile(np.arange(BLOCKS), 50)
        self.write = PagedWrite(self.region, descriptor, BLOCK, 0, BLOCK, index, 0, BLOCK, index, IMM)
        self.transfer = self.link.write_paged(self.write, on_done=self._again)

    def _again(self, transfer):
        if transfer.error is None:
            try:
                self.transfer = self.link.write_paged(self.write, on_done=self._again)
            except LinkClosed:
                return

    def flows(self):
        posted = self.link.posted
        eventually(lambda: self.link.posted > posted + BLOCKS, DEADLINE_S)
        assert self.link.error is None

    def end(self):
        self.link.close()
        assert self.link.in_flight == 0 and self.transfer.done
        assert self.transfer.completed <= self.transfer.posted <= self.transfer.total
        self.engine.unregister(self.region)


class Inflow:
    """Another process writes into this one, on and on."""

    def __init__(self, engine, peer):
        self.memory = np.zeros(BLOCK * BLOCKS, np.uint8)
        self.engine = engine
        self.link = engine.open_link()
        descriptor = self.link.expose(memory_of(self.memory)).descriptor
        engine.immediates.arm(IMM, 1 << 40, _unused)
        peer.ask("stream", self.link.address, descriptor, BLOCK, BLOCKS, IMM)

    def flows(self):
        received = self.engine.immediates.received(IMM)
        eventually(lambda: self.engine.immediates.received(IMM) > received + BLOCKS, DEADLINE_S)

    def end(self):
        """After the close the memory is this process's own."""
        self.link.close()
        received, late = self.engine.immediates.disarm(IMM), self.engine.immediates.late
        self.memory[:] = 0xAB
        time.sleep(0.02)
        assert (self.memory == 0xAB).all() and self.engine.immediates.late == late and received > 0


def _wait_for_death(pidfd):
    """As the messenger learns of it on one host."""
    assert select.select([pidfd], [], [], DEADLINE_S)[0]
    os.close(pidfd)


@pytest.mark.parametrize("provider", list(REPORTS))
def test_a_survivor_says_so_and_goes_on(provider, open_engine, peers):
    engine, killed = open_engine(provider)(), []
    with engine:
        spared = Outflow(engine, peers(), provider)
        for _ in range(KILLS):
            victim = peers()
            pidfd = os.pidfd_open(victim.pid)
            out, into = Outflow(engine, victim, provider), Inflow(engine, victim)
            out.flows()
            into.flows()
            victim.kill()
            killed.append(victim.pid)
            _wait_for_death(pidfd)
            if REPORTS[provider]:
                eventually(lambda out=out: out.transfer.done and out.link.error is not None, DEADLINE_S)
                assert isinstance(out.transfer.error, PeerLost) and f"process {victim.pid}" in str(out.transfer.error)
            into.end()
            out.end()
            assert isinstance(out.transfer.error, TransportError)
            remove_leftovers(victim.pid)
            spared.flows()
            assert engine.stats()["links_open"] == 1 and engine.error is None
        spared.end()
    with open_engine(provider)() as next_start:
        assert next_start.error is None
        assert not [file for file in Path("/dev/shm").iterdir() if file.name.split(":")[0] in map(str, killed)]
