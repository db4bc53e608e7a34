"""What fails half-way leaves nothing behind, and a fault that passes is not held against anybody."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from dataclasses import replace

import numpy as np
import pytest

import transport.engine
import transport.ucx.transport
from tests.transport.pair import TIMEOUT_S, Pair, eventually, memory_of
from transport.api import SingleWrite, make_imm
from transport.engine import TransferEngine
from transport.errors import FabricError, LibraryMissing, ProviderUnavailable, TransportError
from transport.fabric import abi, calls, group
from transport.fabric.domain import Domain
from transport.fabric.lane import Lane
from transport.fabric.mailbox import Mailbox
from transport.fabric.regions import register_source
from transport.fabric.rest import Rest
from transport.fabric.worker import Worker
from transport.ucx import UcxTransport, dll
from transport.ucx import calls as ucx_calls
from transport.ucx.channel import Channel
from transport.ucx.context import Context

IMM = make_imm(4, 1)
EINVAL, ENOMEM = 22, 12
_READ = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@pytest.fixture
def pair(open_engine):
    made = Pair((open_engine("tcp"), open_engine("tcp")))
    yield made
    made.close()


@pytest.fixture
def ucx():
    try:
        dll.load_libucp()
    except LibraryMissing as error:
        pytest.skip(str(error))


@pytest.fixture
def no_threads(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def _descriptors():
    return len(os.listdir("/proc/self/fd"))


def _recording(monkeypatch, owner, name):
    """What `owner.name` has returned, from now on."""
    made, function = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: made.append(function(*args)) or made[-1])
    return made


def test_an_engine_without_a_thread_leaves_no_domain_open(monkeypatch, no_threads):
    made = _recording(monkeypatch, transport.engine, "open_domains")
    for _ in range(2):
        before = _descriptors()
        with pytest.raises(TransportError, match="no thread could be started"):
            TransferEngine("tcp")
    assert _descriptors() == before and not any(domain.handle for domains in made for domain in domains)


def test_a_ucx_transport_without_a_thread_leaves_no_context_open(monkeypatch, ucx, no_threads):
    made = _recording(monkeypatch, transport.ucx.transport, "opened")
    with pytest.raises(TransportError, match="no thread could be started"):
        UcxTransport()
    assert [context.handle for context in made] == [0]


def test_a_context_that_cannot_be_asked_is_closed(monkeypatch, ucx):
    closed = _recording(monkeypatch, Context, "close")
    error = ucx_calls.ucx_error(dll.load_libucp(), "ucp_context_query", -1)
    monkeypatch.setattr(Context, "_queried", lambda _: (_ for _ in ()).throw(error))
    with pytest.raises(FabricError, match="ucp_context_query"):
        UcxTransport()
    assert len(closed) == 1


def test_a_nic_that_cannot_be_used_closes_those_before_it(monkeypatch):
    opened = []

    def second_refuses(*args):
        if opened:
            raise ProviderUnavailable("it keeps a cache of registrations")
        opened.append(Domain(*args))
        return opened[0]

    monkeypatch.setattr(group, "Domain", second_refuses)
    with pytest.raises(ProviderUnavailable, match="cache"):
        TransferEngine("tcp", nics=("127.0.0.1", "127.0.0.2"))
    assert opened[0].handle == opened[0].fabric == 0


def test_a_lane_that_cannot_receive_leaves_no_buffers_registered(pair, monkeypatch):
    closed = _recording(monkeypatch, Mailbox, "close")
    monkeypatch.setattr(Mailbox, "receive", lambda _: -ENOMEM)
    with pytest.raises(FabricError, match="fi_recv on tcp through"):
        pair.sender.open_link()
    assert len(closed) == 1 and pair.sender.stats()["links_open"] == 1


def test_a_link_without_a_doorbell_is_not_opened(open_engine, monkeypatch):
    def refuse(_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Rest, "doorbell", refuse)
    with open_engine("shm")() as engine:
        with pytest.raises(TransportError, match=r"socket to be woken by.*Too many open files"):
            engine.open_link()
        assert engine.stats()["links_open"] == 0 and engine.error is None


def test_an_endpoint_that_cannot_be_enabled_names_its_nic(pair, monkeypatch):
    monkeypatch.setattr(calls, "enable", lambda _: -EINVAL)
    (domain,) = [nic.domain for nic in pair.sender._nics]
    with pytest.raises(FabricError, match=f"fi_enable on tcp through {domain.nic}"):
        pair.sender.open_link()
    monkeypatch.setattr(domain, "profile", replace(domain.profile, reach="rdma"))
    with pytest.raises(FabricError, match="grows with FI_UNIVERSE_SIZE, lower that"):
        pair.sender.open_link()


def test_a_source_that_one_nic_does_not_take_is_read_through_the_other(open_engine, monkeypatch, caplog):
    def refuse(memory):
        raise ProviderUnavailable("no such memory here")

    with open_engine("tcp", nics=("127.0.0.1", "127.0.0.2"))() as engine:
        memory = memory_of(np.zeros(64, np.uint8))
        monkeypatch.setattr(engine._nics[1].domain, "register_source", refuse)
        assert register_source(engine._nics, memory).regions[1] is None and "not read through every NIC" in caplog.text
        monkeypatch.setattr(engine._nics[0].domain, "register_source", refuse)
        with pytest.raises(ProviderUnavailable, match="no such memory here"):
            register_source(engine._nics, memory)


def test_a_greeting_that_fails_leaves_a_link_that_can_be_connected(ucx, monkeypatch):
    pair = Pair((UcxTransport, UcxTransport))
    link, remote = pair.sender.open_link(), pair.receiver.open_link()
    send = Channel.send
    monkeypatch.setattr(Channel, "send", lambda *_, **__: -4)
    with pytest.raises(FabricError, match="ucp_am_send_nbx"):
        link.connect(remote.address, window=4)
    assert link._end.channel.ep == 0 and link.error is None
    monkeypatch.setattr(Channel, "send", send)
    link.connect(remote.address, window=4)
    target = remote.expose(memory_of(pair.target_bytes)).descriptor
    transfer = link.write(SingleWrite(pair.source, target, 4096, 0, 0, IMM))
    assert transfer.wait(TIMEOUT_S) and transfer.error is None
    pair.close()


def test_a_ucx_region_that_does_not_close_is_not_taken_for_revoked(ucx, monkeypatch):
    pair = Pair((UcxTransport, UcxTransport))

    def fail(region):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(pair.receiver._context, "release", fail)
    pair.remote.close()
    monkeypatch.undo()
    assert not pair.remote.revoked and "may still write" in str(pair.remote.error)
    sound = pair.receiver.open_link()
    assert not sound.revoked
    sound.close()
    assert sound.revoked and sound.error is None
    pair.close()


def test_a_source_that_is_retired_under_way_fails_its_transfer_and_not_the_link(pair, monkeypatch):
    """Between the check of who writes and the worker's turn."""
    submit = Worker.submit

    def retire_first(worker, end, transfer):
        pair.source.users.clear()
        pair.sender.unregister(pair.source)
        submit(worker, end, transfer)

    monkeypatch.setattr(Worker, "submit", retire_first)
    transfer = pair.link.write(SingleWrite(pair.source, pair.target, 4096, 0, 0, IMM))
    assert transfer.wait(TIMEOUT_S) and isinstance(transfer.error, ValueError) and transfer.posted == 0
    assert pair.link.error is None and not pair.target_bytes.any()


def test_a_repeated_write_from_an_unregistered_source_is_refused_as_well(pair):
    write = SingleWrite(pair.source, pair.target, 4096, 0, 0, IMM)
    assert pair.link.write(write).wait(TIMEOUT_S)
    pair.sender.unregister(pair.source)
    again = pair.link.write(write)
    assert again.wait(TIMEOUT_S) and "was unregistered" in str(again.error) and again.posted == 0
    assert pair.link.error is None


def test_a_refused_write_that_is_cancelled_leaves_nothing_to_wait_for(pair):
    """Its peer's port takes no connection, so that every post is refused for now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        name = bytearray(pair.remote.address.names[0])
        struct.pack_into(">H", name, 2, listener.getsockname()[1])
        name[4:8] = socket.inet_aton("127.0.0.1")
        link = pair.sender.open_link()
        link.connect(replace(pair.remote.address, names=(bytes(name),)), window=4, name="a deaf one")
        transfer = link.write(SingleWrite(pair.source, pair.target, 4096, 0, 0, IMM))
        eventually(lambda: link._end.blocked)
        transfer.cancel()
        assert transfer.wait(TIMEOUT_S) and transfer.posted == 0
        eventually(lambda: not link._end.blocked)
        assert link.error is None and all(route.stalled_since is None for route in link._end._routes)
        link.close()
        for each in waiting:
            each.close()


def test_errors_that_are_announced_and_do_not_come_count_in_a_row_only(pair):
    reads = []

    def read(*_):
        reads.append(-abi.FI_EAVAIL if len(reads) % 100 else -abi.FI_EAGAIN)
        return reads[-1]

    kept, lane = _READ(read), pair.link._end.lanes[0]

    def replace_read():
        lane.poster.read = ctypes.cast(kept, ctypes.c_void_p).value
        pair.sender._worker._watch()

    pair.sender._worker.inbox.call(replace_read)
    eventually(lambda: len(reads) > 3000)
    assert isinstance(lane, Lane) and not lane.closed and pair.link.error is None
