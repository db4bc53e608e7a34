"""What every transport promises of links: descriptors, windows, quiescence, revocation, peers that come and go."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from tests.transport.pair import TIMEOUT_S, eventually, memory_of
from transport.api import Device, LinkAddress, Memory, PagedWrite, RegionDescriptor, SingleWrite, make_imm
from transport.errors import (
    DescriptorMismatch,
    FabricError,
    LibraryMissing,
    LinkClosed,
    ProviderUnavailable,
    TransportError,
)

IMM, OTHER = make_imm(3, 9), make_imm(4, 1)
_STATS = {
    "writes_posted", "writes_completed", "writes_failed", "bytes_completed", "immediates_late", "messages_sent",
    "messages_received", "paths_lost", "links_open",
}  # fmt: skip


def _unused(_):
    raise AssertionError("must not be called")


def test_a_transport_says_what_it_is(pair):
    sender = pair.sender
    assert 0 <= sender.incarnation < 1 << 64 and sender.incarnation != pair.receiver.incarnation
    assert "\n" not in sender.description and len(sender.description) > 10
    assert isinstance(sender.revokes, bool) and isinstance(sender.receiver_pulls, bool)
    assert sender.stats().keys() >= _STATS and all(type(value) is int for value in sender.stats().values())
    assert pair.link.address.incarnation == sender.incarnation and pair.target.incarnation == pair.receiver.incarnation
    assert len(pair.link.address.names) == len(pair.link.address.rails) >= 1
    assert len(pair.target.keys) == len(pair.remote.address.names)
    assert pair.link.lost_paths == () and pair.link.error is None


def test_addresses_and_descriptors_travel_as_bytes(pair, full):
    link, remote = pair.sender.open_link(), pair.receiver.open_link()
    link.connect(LinkAddress.from_bytes(remote.address.to_bytes()), window=4)
    landed = full()
    pair.receiver.immediates.arm(IMM, 1, landed)
    target = RegionDescriptor.from_bytes(remote.expose(memory_of(pair.target_bytes)).descriptor.to_bytes())
    link.write(SingleWrite(pair.source, target, 4096, 0, 4096, IMM))
    assert landed.wait() and (pair.target_bytes[1] == pair.source_bytes[0]).all()


def test_what_does_not_fit_the_link_is_refused(pair):
    foreign = pair.sender.open_link()
    with pytest.raises(DescriptorMismatch, match="'pigeon'"):
        foreign.connect(replace(pair.remote.address, provider="pigeon"), window=1)
    with pytest.raises(DescriptorMismatch, match="version 1,"):
        foreign.connect(replace(pair.remote.address, version=1), window=1)
    with pytest.raises(DescriptorMismatch, match="another peer"):
        pair.link.immediate(replace(pair.target, incarnation=pair.target.incarnation ^ 1), IMM)
    with pytest.raises(DescriptorMismatch, match="keys"):
        pair.link.immediate(replace(pair.target, keys=(*pair.target.keys, b"12345678")), IMM)
    foreign.connect(pair.remote.address, window=1)
    assert foreign.error is None and pair.link.error is None


def test_device_memory_is_refused_where_only_host_memory_moves(pair):
    memory = Memory(int(pair.source_bytes.ctypes.data), 4096, Device("cuda", 0))
    for attempt in (pair.sender.register, pair.sender.open_link().expose):
        with pytest.raises((ProviderUnavailable, LibraryMissing, FabricError), match="cuda"):
            attempt(memory)
    assert pair.paged(IMM).wait(TIMEOUT_S)


@pytest.mark.parametrize("parts", [2, 7, 64])
def test_a_single_write_in_parts(pair, full, parts):
    landed = full()
    pair.receiver.immediates.arm(IMM, parts, landed)
    length = 100_001
    transfer = pair.link.write(SingleWrite(pair.source, pair.target, length, 3, 1000, IMM, parts))
    assert landed.wait() and transfer.wait(TIMEOUT_S) and transfer.total == parts
    source, target = pair.source_bytes.reshape(-1), pair.target_bytes.reshape(-1)
    assert (target[1000 : 1000 + length] == source[3 : 3 + length]).all() and np.count_nonzero(target) == length
    eventually(lambda: pair.sender.stats()["bytes_completed"] == length)
    for wrong in (0, length + 1):
        with pytest.raises(ValueError, match="parts"):
            pair.link.write(SingleWrite(pair.source, pair.target, length, 0, 0, IMM, wrong))


@pytest.mark.parametrize("window", [1, 5])
def test_no_more_writes_are_outstanding_than_the_window(make_pair, window):
    pair = make_pair(blocks=300, block_bytes=2048, window=window)
    transfer, most = pair.paged(IMM), 0
    while not transfer.done:
        most = max(most, pair.link.in_flight)
        time.sleep(0.0001)
    assert 0 <= most <= window and pair.link.in_flight == 0


def test_quiesce_tells_what_was_posted_after_success_and_cancel(make_pair):
    pair = make_pair(blocks=4096, block_bytes=4096, window=2)
    assert pair.link.quiesce(TIMEOUT_S) == pair.link.posted == 0
    first = pair.paged(IMM, np.arange(10))
    assert pair.link.quiesce(TIMEOUT_S) == 10 and first.done
    second, third = pair.paged(IMM), pair.paged(IMM, np.arange(20))
    with pytest.raises(TimeoutError, match=f"transfer {second.number}"):
        pair.link.quiesce(0.0)
    second.cancel()
    assert pair.link.quiesce(TIMEOUT_S) == pair.link.posted == 10 + second.posted + 20
    assert second.done and third.done and second.posted < second.total and pair.link.in_flight == 0


def test_quiesce_tells_what_was_posted_after_an_error(make_pair):
    pair = make_pair(blocks=4096, block_bytes=4096, window=2)
    transfers = [pair.paged(IMM) for _ in range(3)]
    eventually(lambda: transfers[0].completed > 10)
    pair.remote.close()
    transfers[0].wait(0.5)  # where the provider reports it
    pair.link.close()
    assert pair.link.quiesce(TIMEOUT_S) == pair.link.posted == sum(transfer.posted for transfer in transfers)
    assert pair.sender.stats()["writes_posted"] == pair.link.posted
    assert all(transfer.done and transfer.error is not None for transfer in transfers)


class Stream:
    """Writes that follow each other until one fails or the stream is stopped."""

    def __init__(self, pair, link, target, imm):
        index, size = np.tile(np.arange(pair.blocks), 32), pair.block_bytes
        self.write = PagedWrite(pair.source, target, size, 0, size, index, 0, size, index, imm)
        self.link, self.going, self.posted = link, True, 0
        self.transfer = link.write_paged(self.write, on_done=self._again)

    def _again(self, transfer):
        self.posted += transfer.posted
        if self.going and transfer.error is None:
            try:
                self.transfer = self.link.write_paged(self.write, on_done=self._again)
            except LinkClosed:
                self.going = False
        else:
            self.going = False

    def stop(self):
        self.going = False
        self.transfer.cancel()


def test_closing_a_link_while_its_peer_writes_on(make_pair):
    pair = make_pair(blocks=64, block_bytes=4096, window=16)
    if not pair.receiver.revokes:
        pytest.skip("this transport does not promise that nothing lands after close")
    link, remote = pair.connect()
    cut_bytes = pair.new_target()
    cut_target = remote.expose(memory_of(cut_bytes)).descriptor
    imms = pair.receiver.immediates
    for imm in (IMM, OTHER):
        imms.arm(imm, 1 << 40, _unused)
    cut, spared = Stream(pair, link, cut_target, IMM), Stream(pair, pair.link, pair.target, OTHER)
    eventually(lambda: imms.received(IMM) > 100 and imms.received(OTHER) > 100)
    remote.close()
    received, late = imms.received(IMM), imms.late
    cut_bytes[:] = 0xAB
    going_on = imms.received(OTHER)
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        assert (cut_bytes == 0xAB).all(), "something landed after close"
        time.sleep(0.005)
    assert imms.received(IMM) == received and imms.late == late
    eventually(lambda: imms.received(OTHER) > going_on + 100)
    assert spared.going and pair.link.error is None
    link.close()
    assert cut.transfer.done and (cut.transfer.error is not None or cut.transfer.completed == cut.transfer.total)
    spared.stop()
    posted = pair.link.quiesce(TIMEOUT_S)
    eventually(lambda: spared.posted > 0)  # its callback may still be due
    assert posted >= spared.posted and (cut_bytes == 0xAB).all()


def test_a_write_under_a_revoked_key_lands_nowhere(make_pair, full):
    pair = make_pair()
    if not pair.receiver.revokes:
        pytest.skip("this transport does not promise that nothing lands after close")
    link, remote = pair.connect()
    target = remote.expose(memory_of(pair.target_bytes)).descriptor
    landed = full()
    pair.receiver.immediates.arm(OTHER, 1, landed)
    link.write(SingleWrite(pair.source, target, 64, 0, 64, OTHER))
    assert landed.wait()
    remote.close()
    pair.receiver.immediates.arm(IMM, 1, _unused)
    revoked = link.write(SingleWrite(pair.source, target, 4096, 0, 4096, IMM))
    revoked.wait(0.3)
    link.close()
    assert revoked.done and not pair.target_bytes[1:].any() and pair.receiver.immediates.received(IMM) == 0
    assert pair.paged(make_imm(5, 1)).wait(TIMEOUT_S), "others go on under their own keys"
    eventually(lambda: (pair.target_bytes == pair.source_bytes).all())


def test_peers_appear_and_vanish_while_others_write(make_pair, full):
    pair = make_pair(blocks=64, block_bytes=4096)
    stream = Stream(pair, pair.link, pair.target, OTHER)
    for round_ in range(8):
        link, remote = pair.connect()
        target = pair.new_target()
        descriptor = remote.expose(memory_of(target)).descriptor
        landed, imm = full(), make_imm(10 + round_, 1)
        pair.receiver.immediates.arm(imm, pair.blocks, landed)
        index, size = np.arange(pair.blocks), pair.block_bytes
        link.write_paged(PagedWrite(pair.source, descriptor, size, 0, size, index, 0, size, index, imm))
        assert landed.wait() and (target == pair.source_bytes).all()
        for end in (link, remote)[:: 1 if round_ % 2 else -1]:
            end.close()
    assert stream.going
    eventually(lambda: pair.sender.stats()["links_open"] == pair.receiver.stats()["links_open"] == 1)
    stream.stop()
    posted = pair.link.quiesce(TIMEOUT_S)
    eventually(lambda: stream.posted > 0)  # its callback may still be due
    assert posted >= stream.posted


def test_the_address_of_a_peer_that_has_gone(pair):
    gone = pair.receiver.open_link()
    address, target = gone.address, gone.expose(memory_of(pair.target_bytes)).descriptor
    gone.close()
    link = pair.sender.open_link()
    try:
        link.connect(address, window=4, name="the gone one")
        transfer = link.write(SingleWrite(pair.source, target, 4096, 0, 0, IMM))
    except (FabricError, LinkClosed):
        pass  # it showed at once
    else:
        if not transfer.wait(1.0):
            link.close()
        assert transfer.wait(TIMEOUT_S) and isinstance(transfer.error, TransportError)
    assert not pair.target_bytes.any()
    assert pair.paged(OTHER).wait(TIMEOUT_S)
    link.close()


def test_nothing_is_written_from_a_source_that_was_unregistered(pair):
    pair.sender.unregister(pair.source)
    with pytest.raises(ValueError, match="unregistered: register the memory again"):
        pair.paged(make_imm(3, 1))
