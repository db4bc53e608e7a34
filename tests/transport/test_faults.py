"""Each fault of the fault layer, alone, over the loopback transport."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from tests.transport.pair import TIMEOUT_S, Full, Pair, eventually
from transport.api import PagedWrite, SingleWrite, make_imm
from transport.errors import (
    FabricError,
    LinkClosed,
    MessageTooLarge,
    RegionBusy,
    TransferCancelled,
    TransportClosed,
    TransportError,
)
from transport.fault_plan import Dice
from transport.faults import FaultPlan, FaultyTransport
from transport.loopback import LoopbackNet, LoopbackTransport

IMM = make_imm(1, 1)
LATE = FaultPlan(delay_s=(60.0, 60.0))


class Faulty(Pair):
    """The sender's side has the faults."""

    def __init__(self, plan: FaultPlan, **kwargs):
        net = LoopbackNet()
        openers = lambda: FaultyTransport(LoopbackTransport(net), plan), lambda: LoopbackTransport(net)
        super().__init__(openers, **kwargs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _last_to_land(plan):
    """All blocks go to the same place: what stays there came last."""
    with Faulty(plan) as pair:
        index, size = np.arange(64), pair.block_bytes
        write = PagedWrite(pair.source, pair.target, size, 0, size, index, 0, size, np.zeros(64, np.int64), IMM)
        assert pair.link.write_paged(write).wait(TIMEOUT_S)
        return int(np.flatnonzero((pair.source_bytes == pair.target_bytes[0]).all(axis=1))[0])


def test_without_faults_nothing_changes():
    assert [_last_to_land(FaultPlan(piece_blocks=5)) for _ in range(3)] == [63] * 3


def test_reordering_is_drawn_from_the_seed():
    seeds = {seed: _last_to_land(FaultPlan(seed, reorder=True)) for seed in range(6)}
    assert seeds == {seed: _last_to_land(FaultPlan(seed, reorder=True)) for seed in seeds}
    assert len(set(seeds.values())) > 1


def test_delayed_writes_are_cut_into_pieces_whose_counts_add_up():
    plan = FaultPlan(3, delay_s=(0.0, 0.005), reorder=True, piece_blocks=7)
    with Faulty(plan, blocks=500, block_bytes=64) as pair:
        landed, done = Full(), []
        pair.receiver.immediates.arm(IMM, 500, landed)
        transfer = pair.paged(IMM, on_done=done.append)
        assert (transfer.total, transfer.error) == (500, None)
        seen = []
        while not transfer.done:
            seen.append((transfer.completed, transfer.posted))
            time.sleep(0.0005)
        assert all(completed <= posted for completed, posted in seen) and seen == sorted(seen)
        assert landed.wait() and (pair.target_bytes == pair.source_bytes).all()
        assert (transfer.posted, transfer.completed, transfer.error) == (500, 500, None)
        assert done == [transfer] and transfer.finished_at is not None


def test_what_is_held_back_keeps_its_region_busy_and_ends_with_a_cancel():
    with Faulty(LATE) as pair:
        transfer = pair.paged(IMM)
        with pytest.raises(RegionBusy, match=f"transfer {transfer.number} to receiver"):
            pair.sender.unregister(pair.source)
        with pytest.raises(TimeoutError, match=f"transfer {transfer.number}"):
            pair.link.quiesce(0.01)
        transfer.cancel()
        transfer.cancel()
        assert transfer.done and isinstance(transfer.error, TransferCancelled) and transfer.posted == 0
        pair.sender.unregister(pair.source)
        assert pair.link.quiesce(TIMEOUT_S) == 0


@pytest.mark.parametrize("how", ["link", "transport"])
def test_what_is_held_back_ends_when_it_is_closed(how):
    with Faulty(LATE) as pair:
        done = []
        transfers = [pair.paged(IMM, on_done=done.append), pair.link.immediate(pair.target, IMM, done.append)]
        (pair.link if how == "link" else pair.sender).close()
        assert done == transfers or done == transfers[::-1]
        assert all(transfer.done and transfer.posted == 0 for transfer in transfers)
        assert all(isinstance(transfer.error, LinkClosed | TransportClosed) for transfer in transfers)
        with pytest.raises(TransportError):
            pair.paged(IMM)


def test_a_slow_nic_lets_nothing_pass_faster():
    dice = Dice(FaultPlan(bytes_per_s=1000.0))
    began = time.monotonic()
    dues = [dice.due(500) for _ in range(10)]
    assert dues[0] >= began + 0.5 and all(b - a >= 0.499 for a, b in pairwise(dues))


def test_nothing_is_handed_on_in_a_storm():
    dice = Dice(FaultPlan(delay_s=(0.0, 5.0), storm_every_s=0.1, storm_s=0.04))
    into = [(dice.due(1) - dice.began) % 0.1 for _ in range(300)]
    assert all(each <= 0.06 + 1e-6 or each >= 0.1 - 1e-6 for each in into)


@pytest.mark.parametrize("share", [1.0, 0.05])
def test_a_post_that_fails_ends_its_transfer_and_its_link(share):
    with Faulty(FaultPlan(4, fail_share=share, piece_blocks=4), blocks=400, block_bytes=64) as pair:
        other, remote = pair.connect()
        pair.receiver.immediates.arm(IMM, 1 << 30, lambda _: None)
        transfer = pair.paged(IMM)
        assert transfer.wait(TIMEOUT_S) and isinstance(transfer.error, FabricError) and "fault" in str(transfer.error)
        assert pair.link.error is transfer.error and "towards receiver" in str(transfer.error)
        assert transfer.posted == transfer.completed < transfer.total and (share < 1 or transfer.posted == 0)
        assert pair.link.quiesce(TIMEOUT_S) == transfer.posted
        eventually(lambda: pair.receiver.immediates.received(IMM) == transfer.posted)
        assert int(pair.target_bytes.any(axis=1).sum()) == transfer.posted
        refused = pair.paged(IMM)
        assert refused.wait(TIMEOUT_S) and refused.error is pair.link.error and refused.posted == 0
        assert other.error is None and remote.error is None
        other.send(b"the other link goes on")
        eventually(lambda: pair.there == [b"the other link goes on"])


def test_messages_are_lost_repeated_and_late():
    def came(plan):
        with Faulty(plan) as pair:
            for n in range(100):
                pair.link.send(bytes([n]))
            pair.remote.send(b"the end")
            eventually(lambda: pair.here == [b"the end"])
            time.sleep(0.05)
            return [message[0] for message in pair.there]

    lost = came(FaultPlan(1, lose_share=0.3))
    assert lost == sorted(set(lost)) and 40 < len(lost) < 95 and lost == came(FaultPlan(1, lose_share=0.3))
    repeated = came(FaultPlan(1, repeat_share=0.3))
    assert sorted(set(repeated)) == list(range(100)) and 105 < len(repeated) < 160
    late = came(FaultPlan(1, message_delay_s=(0.0, 0.02)))
    assert sorted(late) == list(range(100)) and late != sorted(late)


def test_a_partitioned_peer_goes_on_writing():
    with Faulty(FaultPlan()) as pair:
        pair.link.partition()
        pair.link.send(b"lost")
        pair.remote.send(b"lost too")
        landed = Full()
        pair.receiver.immediates.arm(IMM, 64, landed)
        assert pair.paged(IMM).wait(TIMEOUT_S) and landed.wait()
        eventually(lambda: pair.sender.stats()["messages_received"] == 1)
        pair.link.partition(False)
        pair.link.send(b"back")
        pair.remote.send(b"back too")
        eventually(lambda: pair.there == [b"back"] and pair.here == [b"back too"])


def test_a_silent_peer_is_noticed_by_nobody_until_the_link_is_closed():
    with Faulty(FaultPlan()) as pair:
        assert pair.paged(IMM, np.arange(3)).wait(TIMEOUT_S)
        pair.link.go_silent()
        transfer = pair.paged(IMM)
        pair.link.send(b"lost")
        pair.remote.send(b"lost too")
        assert not transfer.wait(0.1) and pair.link.error is None and pair.link.posted == 3
        pair.link.close()
        assert transfer.done and isinstance(transfer.error, LinkClosed)
        assert not pair.there and not pair.here


def test_callbacks_are_called_once_and_may_raise_write_and_close(caplog):
    with Faulty(FaultPlan(5, delay_s=(0.0, 0.001), piece_blocks=8)) as pair:
        calls, closed = [], threading.Event()

        def on_done(transfer):
            calls.append(transfer)
            if len(calls) == 1:
                pair.paged(IMM, on_done=on_done)
                raise RuntimeError("on purpose")
            pair.link.close()
            closed.set()

        first = pair.paged(IMM, on_done=on_done)
        assert closed.wait(TIMEOUT_S) and calls[0] is first and len(calls) == 2
        assert "on purpose" in caplog.text and calls[1].completed == 64


def test_single_writes_and_immediates_pass_too():
    with Faulty(FaultPlan(delay_s=(0.0, 0.002), reorder=True)) as pair:
        landed = Full()
        pair.receiver.immediates.arm(IMM, 9, landed)
        parts = pair.link.write(SingleWrite(pair.source, pair.target, 80_000, 0, 0, IMM, 8))
        alone = pair.link.immediate(pair.target, IMM)
        assert landed.wait() and parts.wait(TIMEOUT_S) and alone.wait(TIMEOUT_S)
        assert (parts.total, parts.completed, alone.completed) == (8, 8, 1)
        assert (pair.target_bytes.reshape(-1)[:80_000] == pair.source_bytes.reshape(-1)[:80_000]).all()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"fail_share": 1.5}, "fail_share"),
        ({"lose_share": -0.1}, "lose_share"),
        ({"delay_s": (0.2, 0.1)}, "delay_s"),
        ({"storm_s": 1.0}, "no time between"),
        ({"storm_s": 1.0, "storm_every_s": 1.0}, "no time between"),
        ({"piece_blocks": 0}, "piece_blocks"),
        ({"bytes_per_s": -1.0}, "bytes_per_s"),
    ],
)
def test_a_plan_that_cannot_be_played_is_refused(wrong, text):
    with pytest.raises(ValueError, match=text):
        FaultPlan(**wrong)


def test_a_message_too_large_is_refused_at_once():
    with Faulty(FaultPlan(message_delay_s=(1.0, 1.0))) as pair, pytest.raises(MessageTooLarge):
        pair.link.send(bytes((16 << 20) + 1))
