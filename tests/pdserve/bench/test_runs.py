"""The benchmark itself, with little to do: real processes, real libraries, figures that nobody should quote."""

import ctypes
import errno
import json
import threading

import numpy as np
import pytest

from pdserve.bench.transport.child_process import SideFailed, start_here, start_there
from pdserve.bench.transport.cli import main
from pdserve.bench.transport.listen import listen
from pdserve.bench.transport.load import Load, SideSpec
from pdserve.bench.transport.loopback import loopback_rounds
from pdserve.bench.transport.pair import Pair
from transport.errors import FabricError

pytest.importorskip("numba")
TOTAL = 2 << 20


def _spec(system, sends, provider="tcp"):
    return SideSpec(system, provider, sends, TOTAL, 64)


def _pair(system, provider="tcp"):
    return Pair(system, provider, tuple(start_here(_spec(system, sends, provider)) for sends in (True, False)))


def test_a_whole_run_writes_every_table(tmp_path, capsys):
    document, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    arguments = ["--wires", "tcp", "--mib", "2", "--rounds", "2", "--pages", "16KiB", "--singles", "256KiB"]
    sections = ["--only", "paged,single,latency,post"]
    assert main([*arguments, *sections, "--json", str(document), "--plot", str(picture)]) == 0
    figures = json.loads(document.read_text())
    systems = ["engine", "engine/2 NICs", "raw"]
    assert [row["system"] for row in figures["paged"]] == [row["system"] for row in figures["single"]] == systems
    assert all(0 < row["gb_per_s_min"] <= row["gb_per_s_median"] <= row["gb_per_s_max"] for row in figures["paged"])
    assert {(row["system"], row["of"]) for row in figures["shares"]} == {(s, "raw") for s in systems[:2]}
    assert {(row["system"], row["mode"]) for row in figures["latency"]} >= {
        ("engine", "polled"), ("engine", "callback"), ("raw-ctypes", "polled"),
    }  # fmt: skip
    assert [row["system"] for row in figures["post_cost"]] == systems[:2] and len(figures["cpu"]) == 3
    assert figures["configuration"]["systems"]["engine on tcp"].startswith("tcp over ")
    assert picture.stat().st_size > 0
    printed = capsys.readouterr().out
    assert "paged writes, random order" in printed and "window: 128" in printed


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_idle_sides_are_woken_by_messages_and_by_immediates(provider):
    pair = _pair("engine", provider)
    try:
        for state in ("open", "armed"):
            if state == "armed":
                pair.both("rest", state)
            assert all(share >= 0 for share in pair.both("idle", 0.05))
            called, heard = pair.each(("call", state, 3, 0.02), ("hear", state, 3))
            assert len(called) == len(heard) == 3
            assert all(before < after for before, after in zip(called, heard, strict=True))
    finally:
        pair.close()


def test_wrong_bytes_are_not_timed():
    pair = _pair("raw")
    load = Load("paged", 4096, 64)
    try:
        pair.verify(load)
        pair.both("fill", load.kind, load.block_bytes, load.blocks)
        pair._sides[1].ask("verify", load.kind, load.block_bytes, load.blocks, 1)
        assert pair._sides[1].answer() is False
    finally:
        pair.close()


def test_a_side_that_cannot_be_says_why():
    with pytest.raises(SideFailed, match="engine on no-such, sender: ProviderUnavailable"):
        _pair("engine", "no-such")
    with pytest.raises(SideFailed, match="nixl on tcp, sender: ModuleNotFoundError"):
        _pair("nixl")
    with pytest.raises(SideFailed, match="cannot start /no/python"):
        start_here(_spec("raw", True), "/no/python")


def test_without_a_listener_or_a_provider_the_benchmark_fails_and_says_so(capsys):
    assert main(["--quick", "--connect", "127.0.0.1:1"]) == 1
    assert "nothing listens on 127.0.0.1:1" in capsys.readouterr().err
    assert main(["--quick", "--wires", "no-such"]) == 1
    assert "engine on no-such, sender: ProviderUnavailable" in capsys.readouterr().err


def test_only_what_a_side_offers_can_be_asked():
    child = start_here(_spec("raw", True))
    try:
        child.ask("__init__", 1)
        with pytest.raises(SideFailed, match="cannot be asked for '__init__'"):
            child.answer()
    finally:
        child.close()


def test_the_receiver_can_be_on_another_host():
    said, ready = [], threading.Event()

    def hear(line):
        said.append(line)
        ready.set()

    server = threading.Thread(target=listen, args=(("127.0.0.1", 0), hear, 1))
    server.start()
    assert ready.wait(10)
    port = int(said[0].rpartition(":")[2])
    pair = Pair("raw", "tcp", (start_here(_spec("raw", True)), start_there(_spec("raw", False), ("127.0.0.1", port))))
    pair.verify(Load("paged", 4096, 64))
    pair.close()
    server.join(20)
    assert not server.is_alive()
    with pytest.raises(SideFailed, match="start `pdserve bench transport --listen` there first"):
        start_there(_spec("raw", False), ("127.0.0.1", port))


def test_blocks_through_the_loopback_transport_all_land_and_count():
    rounds = loopback_rounds(20_000, 2)
    assert len(rounds) == 2 and all(r.seconds > 0 for r in rounds)


def test_the_bare_loops_raise_what_the_queue_says():
    from pdserve.bench.transport.sides.raw import RawSide

    read = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
        lambda *_: -errno.EINVAL
    )
    sides = [RawSide(_spec("raw", sends)) for sends in (True, False)]
    try:
        starts = [side.start() for side in sides]
        sides[0].meet(starts[1])
        for side in sides:
            side.prepare("paged", 4096, 8, 0)
            side.poster.read = ctypes.cast(read, ctypes.c_void_p).value
            with pytest.raises(FabricError) as caught:
                side.run()
            assert caught.value.code == errno.EINVAL
        assert not np.any(sides[0].memory)
    finally:
        for side in sides:
            side.close()
