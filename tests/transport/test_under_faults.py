"""A million blocks under faults, to eight peers at once: counts exact, bytes in place, nothing left behind."""

from __future__ import annotations

import gc
import hashlib
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from tests.transport.pair import Full, eventually, memory_of
from transport.api import PagedWrite, Transport, make_imm
from transport.errors import LibraryMissing, LinkClosed, PeerLost, ProviderUnavailable
from transport.faults import FaultPlan, FaultyTransport
from transport.loopback import LoopbackNet, LoopbackTransport
from transport.open import open_transport

PEERS = 8
WAIT_S = 120.0
PLAN = FaultPlan(
    11, delay_s=(0.0, 0.004), reorder=True, bytes_per_s=400e6, storm_every_s=0.05, storm_s=0.01,
    lose_share=0.1, repeat_share=0.1, message_delay_s=(0.0, 0.002),
)  # fmt: skip


@dataclass
class World:
    """`handoffs` transfers of `blocks` blocks to each of the peers, and two more peers that come to grief."""

    sender: FaultyTransport
    receivers: list[Transport]
    handoffs: int
    blocks: int
    block_bytes: int

    def run(self) -> None:
        rows = self.handoffs * self.blocks
        draw = np.random.default_rng(12)
        pool = draw.integers(0, 256, (1 << 14, self.block_bytes), dtype=np.uint8)
        source = self.sender.register(memory_of(pool))
        peers = [self._peer(receiver, rows) for receiver in self.receivers]
        peers[-2][0].go_silent()
        transfers, expected = [], [hashlib.sha256() for _ in peers]
        for handoff in range(self.handoffs):
            for n, (link, target, _, _) in enumerate(peers):
                index = draw.integers(0, len(pool), self.blocks)
                there = np.arange(handoff * self.blocks, (handoff + 1) * self.blocks)
                size, imm = self.block_bytes, make_imm(handoff, 1)
                transfers.append(
                    (n, link.write_paged(PagedWrite(source, target, size, 0, size, index, 0, size, there, imm)))
                )
                expected[n].update(pool[index].tobytes())
                link.send(b"control")
        transfers += self._cut_off(*peers[-1][:2])
        self._check(peers, transfers, expected)
        for link, *_ in peers:
            link.close()
        self.sender.unregister(source)

    def _peer(self, receiver, rows):
        link, remote = self.sender.open_link(), receiver.open_link()
        memory = np.zeros((rows, self.block_bytes), np.uint8)
        target = remote.expose(memory_of(memory)).descriptor
        link.connect(remote.address, window=256, name="peer")
        remote.connect(link.address, window=0)
        landed = [Full() for _ in range(self.handoffs)]
        for slot, full in enumerate(landed):
            receiver.immediates.arm(make_imm(slot, 1), self.blocks, full)
        return link, target, memory, landed

    def _cut_off(self, link, target):
        """The last peer closes while it is written to. Whoever goes on writing learns of it."""
        eventually(lambda: link.posted > 0, WAIT_S)
        self.receivers[-1].close()
        more = []
        deadline = time.monotonic() + WAIT_S
        while link.error is None:
            assert time.monotonic() < deadline
            more.append((PEERS + 1, link.immediate(target, make_imm(0, 1))))
            time.sleep(0.01)
        return more

    def _check(self, peers, transfers, expected):
        good = range(PEERS)
        for n in good:
            assert all(full.wait(WAIT_S) for full in peers[n][3]), f"peer {n}"
            assert hashlib.sha256(peers[n][2].tobytes()).digest() == expected[n].digest()
            for slot in range(self.handoffs):
                assert self.receivers[n].immediates.disarm(make_imm(slot, 1)) == self.blocks
            assert self.receivers[n].immediates.late == self.receivers[n].immediates.overflow == 0
            assert peers[n][0].quiesce(WAIT_S) == peers[n][0].posted == self.handoffs * self.blocks
        for n, transfer in transfers:
            if n in good:
                assert transfer.error is None and transfer.posted == transfer.completed == self.blocks
        for n, error in ((PEERS, LinkClosed), (PEERS + 1, PeerLost)):
            link = peers[n][0]
            link.close()
            mine = [transfer for m, transfer in transfers if m == n]
            assert all(transfer.done for transfer in mine) and any(transfer.error is not None for transfer in mine)
            assert all(isinstance(each.error, error) for each in mine if each.completed < each.total)
            assert link.posted == sum(transfer.posted for transfer in mine)


_WATCHED = ("FaultyTransfer", "FaultyLink", "TransferState", "Part", "LoopbackLink", "FabricLink", "Slots")


def _in_use():
    """What could leak, counted: objects, threads, descriptors."""
    gc.collect()
    kinds = Counter(type(each).__name__ for each in gc.get_objects())
    counts = {kind: kinds[kind] for kind in _WATCHED}
    return counts | {"threads": threading.active_count(), "descriptors": len(os.listdir("/proc/self/fd"))}


def _run(open_sender, open_receiver, **size):
    """`before` is taken after a small run: what is loaded once stays."""
    before = None
    for shrink in (50, 1):
        receivers = [open_receiver() for _ in range(PEERS + 2)]
        sender = FaultyTransport(open_sender(), PLAN)
        blocks = size["blocks"] // shrink
        World(sender, receivers, size["handoffs"], blocks, size["block_bytes"]).run()
        assert sender.stats()["links_open"] == 0 and not sender.links
        sender.close()
        for receiver in receivers:
            receiver.close()
        assert sender.error is None and all(receiver.error is None for receiver in receivers)
        del sender, receivers
        before = before or _in_use()
    # Less is no leak: what other tests have left may end meanwhile.
    eventually(lambda: all(count <= before[what] for what, count in _in_use().items()), 10.0)


def test_a_million_blocks_over_loopback():
    net = LoopbackNet()
    _run(
        lambda: LoopbackTransport(net, seed=13, delay_s=(0.0, 0.001), nics=2),
        lambda: LoopbackTransport(net, nics=2),
        handoffs=5, blocks=25_000, block_bytes=64,
    )  # fmt: skip


@pytest.mark.parametrize("nics", [("127.0.0.1",), pytest.param(("127.0.0.1", "127.0.0.2"), marks=pytest.mark.slow)])
def test_a_hundred_thousand_blocks_over_tcp(nics):
    def opened():
        try:
            return open_transport("tcp", nics=nics, stall_timeout_s=2.0)
        except (LibraryMissing, ProviderUnavailable) as error:
            pytest.skip(str(error))

    _run(opened, opened, handoffs=5, blocks=2_500, block_bytes=512)
