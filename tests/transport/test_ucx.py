"""What is UCX's own: which library is taken, its declarations, its keys and greetings, and a peer that goes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.transport.pair import TIMEOUT_S, Full, Pair, eventually, memory_of
from transport.api import Device, Memory, SingleWrite, make_imm
from transport.errors import DescriptorMismatch, FabricError, LibraryMissing, PeerLost, ProviderUnavailable
from transport.ucx import UcxTransport, abi, dll, loops
from transport.ucx.binding import bind_loops
from transport.ucx.posting import Arrivals, function_table

IMM = make_imm(3, 1)


@pytest.fixture(scope="module")
def library():
    try:
        return dll.load_libucp()
    except LibraryMissing as error:
        pytest.skip(str(error))


@pytest.fixture
def pair(library):
    made = Pair((lambda: UcxTransport(stall_timeout_s=0.5), lambda: UcxTransport(stall_timeout_s=0.5)))
    yield made
    made.close()


def _loading(body, **names):
    """Runs `body` in a process that has loaded no UCX yet; returns what it printed."""
    lines = [*(f"{name} = {value!r}" for name, value in names.items()), "from transport.ucx import dll", body]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def test_the_library_says_where_it_comes_from(library):
    assert Path(library.path).exists() and library.version >= (1, 20)
    assert dll.load_libucp() is library and library.strerror(-80) == "Endpoint timeout"


def test_one_process_takes_one_library(library, tmp_path):
    copy = tmp_path / "libucp.so.0"
    shutil.copy(library.path, copy)
    with pytest.raises(LibraryMissing, match=r"uses .* already"):
        dll.load_libucp(str(copy))
    assert dll.load_libucp(library.path).lib is library.lib


def test_what_is_no_library_is_refused_with_advice(library):
    assert "pip install mpich" in _loading("dll.load_libucp('/nowhere/libucp.so.0')")
    assert "is no libucp: it lacks ucp_" in _loading("dll.load_libucp('libc.so.6')")


def test_an_old_system_library_yields_to_a_wheel():
    body = "dll.system_version = lambda: (1, 13); print(dll._SONAME in dll.candidates())"
    assert _loading(body) == "False"
    body = "dll.system_version = lambda: (1, 13); dll.wheel_candidates = lambda: []; dll.load_libucp()"
    answer = _loading(body)
    assert "LibraryMissing" not in answer or "1.13, too old" in answer  # unless libucx-cu12 is installed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nics": ("eth99",)}, "eth99 here: .*interfaces of this machine: .*lo"),
        ({"tls": ("pigeon",)}, "offers none of pigeon"),
        ({"provider": "tcp"}, "provider 'ucx', not 'tcp'"),
    ],
)
def test_what_ucx_does_not_offer_is_named(library, options, text):
    with pytest.raises(ProviderUnavailable, match=text):
        UcxTransport(**options)


@pytest.mark.parametrize("options", [{"nics": ()}, {"tls": ("tcp,cma",)}, {"nics": ("",)}])
def test_names_are_checked(library, options):
    with pytest.raises(ValueError, match="without commas"):
        UcxTransport(**options)


def test_only_tcp_promises_that_a_close_revokes(library):
    with UcxTransport() as transport:
        assert transport.revokes and not transport.receiver_pulls
        assert "ucx (tcp)" in transport.description and library.path in transport.description
    with UcxTransport(tls=("tcp", "cma")) as transport:
        assert not transport.revokes


def test_shared_memory_of_ucx_carries_writes_too(library):
    pair = Pair((lambda: UcxTransport(tls=("tcp", "posix", "cma")),) * 2)
    landed = Full()
    pair.receiver.immediates.arm(IMM, pair.blocks, landed)
    pair.paged(IMM)
    assert landed.wait() and (pair.target_bytes == pair.source_bytes).all()
    pair.close()


def test_device_memory_without_cuda_is_refused(library):
    memory = Memory(1 << 20, 4096, Device("cuda", 0))
    with UcxTransport() as transport, pytest.raises(ProviderUnavailable, match=r"cuda:0 memory .*pdserve\[ucx-cuda\]"):
        transport.register(memory)


def test_a_cpu_that_is_not_there_is_named(library):
    with pytest.raises(ValueError, match="CPU 100000"):
        UcxTransport(cpu=100_000)


@pytest.mark.parametrize("damage", ["bytes", "length", "link"])
def test_a_damaged_key_breaks_its_link_before_anything_is_put(pair, damage):
    key = pair.target.keys[0]
    other, remote = pair.connect()
    elsewhere = remote.expose(memory_of(pair.target_bytes)).descriptor.keys[0]
    bad = {"bytes": key[:-1] + bytes([key[-1] ^ 1]), "length": b"key", "link": elsewhere}[damage]
    target = replace(pair.target, keys=(bad,))
    transfer = pair.link.write(SingleWrite(pair.source, target, 4096, 0, 0, IMM))
    assert transfer.wait(TIMEOUT_S) and isinstance(transfer.error, FabricError)
    assert transfer.posted == 0 and "key is damaged" in str(pair.link.error)
    assert not pair.target_bytes.any() and other.error is None


def test_an_address_of_another_link_is_not_written_to(pair):
    """As if the peer had ended and another process had been given its port."""
    link, remote = pair.sender.open_link(), pair.receiver.open_link()
    name = remote.address.names[0]
    link.connect(replace(remote.address, names=(bytes(8) + name[8:],)), window=4, name="its heir")
    target = remote.expose(memory_of(pair.target_bytes)).descriptor
    transfer = link.write(SingleWrite(pair.source, target, 4096, 0, 0, IMM))
    assert transfer.wait(TIMEOUT_S)
    assert isinstance(transfer.error, PeerLost) and "another process answers" in str(transfer.error)
    assert transfer.posted == 0 and not pair.target_bytes.any() and remote.error is None


def test_a_damaged_address_is_refused(pair):
    link = pair.sender.open_link()
    with pytest.raises(DescriptorMismatch, match="damaged"):
        link.connect(replace(pair.remote.address, names=(b"short",)), window=1)
    with pytest.raises(DescriptorMismatch, match="2 names"):
        link.connect(replace(pair.remote.address, names=(b"a", b"b"), rails=(0, 1)), window=1)
    link.connect(pair.remote.address, window=1)


def test_a_peer_that_never_answers_is_lost_after_the_stall_timeout(pair):
    going_on = threading.Event()
    pair.receiver._worker.inbox.send(going_on.wait)
    link = pair.sender.open_link()
    link.connect(pair.remote.address, window=4, name="a sleeper")
    transfer = link.write(SingleWrite(pair.source, pair.target, 4096, 0, 0, IMM))
    assert transfer.wait(TIMEOUT_S)
    going_on.set()
    assert isinstance(transfer.error, PeerLost) and "a sleeper" in str(transfer.error) and transfer.posted == 0


def test_a_closed_writer_with_everything_in_flight_harms_no_receiver(pair):
    """UCX's emulated put would end this process here, see `transport.ucx.context`."""
    for _ in range(10):
        link, remote = pair.sender.open_link(), pair.receiver.open_link()
        target = remote.expose(memory_of(pair.target_bytes)).descriptor
        link.connect(remote.address, window=64)
        pair.link, pair.target = link, target
        transfers = [pair.paged(IMM) for _ in range(20)]
        eventually(lambda first=transfers[0]: first.posted > 0)
        link.close()
        assert all(transfer.done for transfer in transfers)
        remote.close()
    assert pair.receiver.error is None


def test_what_completed_before_a_close_is_counted_there(pair):
    """The immediates of a completed transfer are on their way when its link closes, not in a buffer that goes too."""
    pair.receiver.immediates.arm(IMM, 1 << 30, lambda _: None)
    total = 0
    for _ in range(20):
        link, remote = pair.connect(window=64)
        pair.link, pair.target = link, remote.expose(memory_of(pair.target_bytes)).descriptor
        assert pair.paged(IMM).wait(TIMEOUT_S)
        link.close()
        total += pair.blocks
        eventually(lambda expected=total: pair.receiver.immediates.received(IMM) == expected)


@pytest.mark.parametrize("calls", ["numba", "ctypes"])
def test_arrivals_are_bounded_and_checked(library, calls):
    if calls == "numba":
        pytest.importorskip("numba")
    bound = bind_loops(calls)
    arrivals = Arrivals(function_table(library), identity=77)
    on_immediate, on_frame = abi.ON_MESSAGE(bound.on_immediate), abi.ON_MESSAGE(bound.on_frame)
    header, param, data = np.zeros(3, np.int64), np.zeros(2, np.int64), np.arange(32, dtype=np.uint8)

    def immediate(imm, times, identity=77, length=16):
        header[:2] = imm | times << 32, identity
        on_immediate(arrivals.block, header.ctypes.data, length, 0, 0, param.ctypes.data)

    for imm, times in ((5, 3), (5, 1), (2**32 - 1, 64)):
        immediate(imm, times)
    taken = arrivals.take_imms()
    assert taken.tolist() == [5] * 4 + [2**32 - 1] * 64 and arrivals.take_imms() is None
    for wrong in ((5, 65), (5, 0), (5, 1, 78), (5, 1, 77, 24)):
        immediate(*wrong)
    assert arrivals.take_damaged() == 4 and arrivals.take_imms() is None and not arrivals.overrun
    header[:] = loops.FRAGMENT, 77, 1
    for length in (32, 0, loops.FRAME_DATA_BYTES + 1):
        on_frame(arrivals.block, header.ctypes.data, 24, data.ctypes.data, length, param.ctypes.data)
    assert arrivals.take_frames() == [(loops.FRAGMENT, bytes(range(32))), (loops.FRAGMENT, b"")]
    assert arrivals.take_damaged() == 1
    for _ in range(loops.FRAME_CAPACITY + 1):
        on_frame(arrivals.block, header.ctypes.data, 24, 0, 0, param.ctypes.data)
    assert arrivals.overrun and len(arrivals.take_frames()) == loops.FRAME_CAPACITY
