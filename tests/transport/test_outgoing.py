"""The transfers of one link as a state machine: submit, post, complete, fail, lose paths, cancel, close."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from transport.api import Memory, RegionDescriptor, make_imm
from transport.descriptors import DESCRIPTOR_VERSION
from transport.errors import LinkClosed, PeerLost, TransferCancelled
from transport.outgoing import Outbox, Outgoing
from transport.transfer import Order, TransferState, immediate_order, single_order
from transport.writes import SingleWrite

BLOCK = 100


class Source:
    def __init__(self):
        self.memory = Memory(0, 1 << 30)
        self.users = set()
        self.retired = False


def _order(source, blocks, last_bytes=BLOCK):
    index = np.arange(blocks)
    return Order(source, BLOCK, 0, BLOCK, index, 0, BLOCK, index, (b"k",), make_imm(1, 1), last_bytes)


def _lost(n=0):
    return PeerLost("write", 107, f"loss {n}")


class Links(RuleBasedStateMachine):
    """`flying` is what this test has posted and neither ended nor abandoned: (path, ticket) of each block."""

    transfers = Bundle("transfers")

    @initialize(here=st.integers(1, 3), there=st.integers(1, 3))
    def connect(self, here, there):
        self.outbox, self.source = Outbox(), Source()
        self.outgoing = Outgoing(self.outbox)
        self.paths = self.outgoing.connect(tuple(range(here)), tuple(range(there)))
        self.all, self.cancelled, self.blocks = [], set(), {}
        self.flying: list[tuple] = []
        self.completed_bytes, self.closed, self.losses = 0, False, 0

    def _submit(self, order):
        transfer = TransferState(order, None, "", self.outgoing.cancel)
        self.all.append(transfer)
        self.blocks[transfer] = Counter()
        self.outgoing.submit(transfer)
        return transfer

    @rule(target=transfers, blocks=st.integers(0, 30), odd=st.booleans())
    def submit(self, blocks, odd):
        return self._submit(_order(self.source, blocks, BLOCK - 1 if odd and blocks else BLOCK))

    @rule(path=st.integers(0, 8), most=st.integers(1, 20))
    def post(self, path, most):
        path = self.paths[path % len(self.paths)]
        while path.next is not None and most > 0:
            part = path.next
            count = min(most, part.stop - part.at)
            for block in range(part.at, part.at + count):
                self.blocks[part.transfer][block] += 1
                last = block == part.transfer.total - 1
                assert part.block_bytes == (part.transfer.order.last_bytes if last else BLOCK)
            self.flying += [(path, part)] * count
            self.outgoing.posted(path, count)
            most -= count

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def complete(self, data):
        chosen = data.draw(st.sets(st.integers(0, len(self.flying) - 1), min_size=1, max_size=8))
        tickets = [self.flying[n][1].ticket for n in chosen]
        self.completed_bytes += sum(self.flying[n][1].block_bytes for n in chosen)
        self.flying = [each for n, each in enumerate(self.flying) if n not in chosen]
        self.outgoing.completed(np.array(tickets, np.int64))

    @precondition(lambda self: self.flying)
    @rule(which=st.integers(0, 1000))
    def fail(self, which):
        path, part = self.flying.pop(which % len(self.flying))
        self.losses += 1
        self.outgoing.failed(part.ticket, _lost(self.losses))
        assert path.broken is not None and isinstance(part.transfer.error, PeerLost | TransferCancelled | LinkClosed)

    @rule(path=st.integers(0, 8), also_abandon=st.booleans())
    def break_path(self, path, also_abandon):
        path = self.paths[path % len(self.paths)]
        self.losses += 1
        self.outgoing.break_path(path, _lost(self.losses))
        if also_abandon:
            self.outgoing.abandon([path])
            self.flying = [each for each in self.flying if each[0] is not path]
        assert path.next is None

    @rule(transfer=transfers)
    def cancel(self, transfer):
        self.cancelled.add(transfer)
        transfer.cancel()

    @rule()
    def close(self):
        self.closed = True
        self.outgoing.break_off(LinkClosed("closed"))
        self.outgoing.abandon()
        self.flying = []

    @invariant()
    def books_balance(self):
        if not hasattr(self, "all"):
            return
        assert self.outgoing.in_flight == len(self.flying)
        assert self.outgoing.posted_total == self.outbox.posted == sum(t.posted for t in self.all)
        assert self.outbox.completed == sum(t.completed for t in self.all)
        assert self.outbox.failed == sum(t.failed for t in self.all)
        assert self.outbox.bytes_completed == self.completed_bytes
        for path in self.paths:
            assert path.in_flight == sum(each[0] is path for each in self.flying)
        assert self.outbox.paths_lost == len(self.outgoing.lost)

    @invariant()
    def no_block_is_posted_twice(self):
        for transfer in getattr(self, "all", ()):
            blocks = self.blocks[transfer]
            assert transfer.posted == len(blocks) and set(blocks.values()) <= {1}

    @invariant()
    def each_is_done_once_and_only_when_nothing_more_can_come(self):
        if not hasattr(self, "all"):
            return
        assert Counter(self.outbox.finished) == Counter(t for t in self.all if t.done)
        waiting = Counter()
        for path in self.paths:
            assert path.next is None or not path.next.transfer.stopped
            for part in path.pending:
                waiting[part.transfer] += 0 if part.transfer.stopped else part.stop - part.at
        for transfer in self.all:
            flying = sum(part.transfer is transfer for _, part in self.flying)
            assert transfer.in_flight == flying
            if transfer.done:
                assert not flying and not waiting[transfer] and transfer.finished_at is not None
                assert (transfer.error is None) == (transfer.completed == transfer.total)
                assert transfer not in self.source.users
            elif transfer.stopped:
                assert flying and not waiting[transfer], "stopped, and waits for what is in flight"
            else:
                assert transfer.posted + waiting[transfer] == transfer.total, "nothing of it is lost or queued twice"
                assert flying or waiting[transfer]
        assert self.outgoing.busy == any(not t.done for t in self.all)

    @invariant()
    def the_last_path_breaks_the_link(self):
        if not hasattr(self, "all"):
            return
        if len(self.outgoing.lost) == len(self.paths):
            assert self.outgoing.broken is not None
        if self.outgoing.broken is not None and not self.closed:
            assert len(self.outgoing.lost) == len(self.paths) and self.outgoing.error is self.outgoing.broken

    def teardown(self):
        """What is left is posted and completed: then everything is done."""
        if not hasattr(self, "all"):
            return
        for _ in range(200):
            for path in range(len(self.paths)):
                self.post(path, 50)
            if not self.flying:
                break
            self.outgoing.completed(np.array([part.ticket for _, part in self.flying], np.int64))
            self.completed_bytes += sum(part.block_bytes for _, part in self.flying)
            self.flying = []
        assert all(transfer.done for transfer in self.all) and not self.source.users
        self.books_balance()
        for transfer in self.all:
            whole = transfer.completed == transfer.total
            assert whole or transfer in self.cancelled or self.losses or self.closed


TestLinks = Links.TestCase
TestLinks.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def _linked(here=2, there=2):
    outbox = Outbox()
    outgoing = Outgoing(outbox)
    return outgoing, outgoing.connect(tuple(range(here)), tuple(range(there)))


def _submitted(outgoing, order):
    transfer = TransferState(order, None, "", outgoing.cancel)
    outgoing.submit(transfer)
    return transfer


@pytest.mark.parametrize(("here", "there"), [(1, 1), (2, 2), (3, 2), (2, 3), (1, 4)])
def test_over_some_transfers_all_nics_of_a_side_carry_alike(here, there):
    outgoing, paths = _linked(here, there)
    for _ in range(12):
        _submitted(outgoing, _order(None, 60))
    loads = Counter(), Counter()
    for path in paths:
        for part in path.pending:
            for side in (0, 1):
                loads[side][path.pair[side]] += part.stop - part.start
    assert [len(set(side.values())) for side in loads] == [1, 1]


def test_what_was_posted_is_never_dealt_again():
    outgoing, (one, two) = _linked()
    transfer = _submitted(outgoing, _order(None, 10))
    outgoing.posted(one, 2)
    outgoing.break_path(one, _lost())
    ranges = sorted((part.start, part.stop) for part in two.pending)
    posted = (0, 2) if ranges[0][0] else (5, 7)
    assert sorted([*ranges, posted]) == ([(0, 2), (2, 5), (5, 10)] if posted == (0, 2) else [(0, 5), (5, 7), (7, 10)])
    assert transfer.error is None and not transfer.done and outgoing.error is None


def test_a_write_in_flight_on_a_path_that_is_abandoned_fails_its_transfer_alone():
    outgoing, (one, two) = _linked()
    hit, spared = _submitted(outgoing, _order(None, 10)), _submitted(outgoing, _order(None, 10))
    outgoing.posted(one, 1)
    outgoing.break_path(one, _lost())
    outgoing.abandon([one])
    assert hit.done and isinstance(hit.error, PeerLost) and (hit.posted, hit.completed, hit.failed) == (1, 0, 1)
    while (part := two.next) is not None:
        assert part.transfer is spared
        outgoing.posted(two, part.stop - part.at)
        outgoing.completed_of(part.ticket, part.in_flight)
    assert spared.done and spared.error is None and spared.completed == 10


def test_an_error_of_a_transfer_that_completed_after_all_is_forgotten():
    outgoing, (one,) = _linked(1, 1)
    transfer = _submitted(outgoing, _order(None, 4))
    outgoing.posted(one, 4)
    transfer.cancel()
    assert isinstance(transfer.error, TransferCancelled)
    outgoing.completed(np.full(4, next(iter(outgoing._outstanding)), np.int64))
    assert transfer.done and transfer.error is None


def test_a_range_in_parts_covers_it_exactly():
    target = RegionDescriptor(DESCRIPTOR_VERSION, "p", 0, 0, 1000, (b"k", b"l"))
    for length, parts in ((1000, 1), (1000, 3), (999, 4), (7, 7), (64, 2)):
        order = single_order(SingleWrite(Source(), target, length, 0, 0, make_imm(1, 1), parts), "p")
        starts = order.source_stride * order.source_index
        sizes = [order.block_bytes] * (parts - 1) + [order.last_bytes]
        assert len(starts) == parts and starts[0] == 0 and sum(sizes) == order.bytes_of(0, parts) == length
        assert all(start + size == following for start, size, following in zip(starts, sizes, starts[1:], strict=False))
    with pytest.raises(ValueError, match="cannot be cut into 6 parts"):
        single_order(SingleWrite(Source(), target, 10, 0, 0, make_imm(1, 1), 6), "p")
    assert len(immediate_order(target, make_imm(1, 1), "p").source_index) == 1
