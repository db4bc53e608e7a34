"""Loading libfabric, choosing a provider, and what is said when that fails."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from transport import dll
from transport.engine import TransferEngine
from transport.errors import FabricError, LibraryMissing, PeerLost, ProviderUnavailable
from transport.fabric import calls, info
from transport.fabric.leftovers import remove_leftovers


@pytest.fixture
def library():
    try:
        return dll.load_libfabric()
    except LibraryMissing as error:
        pytest.skip(str(error))


def test_library_is_remembered_with_path_and_version(library):
    assert library.path.startswith("/") and library.version >= (1, 17)
    assert dll.load_libfabric() is library


def test_explicit_path_wins(library):
    assert dll.load_libfabric(library.path).path == library.path


def test_missing_library_says_what_to_install(tmp_path):
    with pytest.raises(LibraryMissing, match="pip install mpich"):
        TransferEngine("tcp", library=str(tmp_path / "libfabric.so.1"))


def test_a_file_that_is_no_libfabric(tmp_path):
    with pytest.raises(LibraryMissing, match="is no libfabric"):
        dll.load_libfabric("libc.so.6")


@pytest.mark.parametrize("name", ["verbs", "efa"])
def test_providers_that_come_later_say_so(name):
    with pytest.raises(ProviderUnavailable, match=f"'{name}' is planned"):
        TransferEngine(name)


def test_unknown_provider_names_the_known():
    with pytest.raises(ProviderUnavailable, match="unknown provider 'pigeon'; choose of: tcp"):
        TransferEngine("pigeon")


def test_available_providers(library):
    assert {"tcp", "shm"} <= set(info.available(library))


def test_bind_address_chooses_the_interface(library):
    with TransferEngine("tcp", bind_address="127.0.0.1") as engine:
        assert engine.open_link().address.name[4:8] == bytes([127, 0, 0, 1])
    with pytest.raises(ProviderUnavailable, match=r"no interface .* 203\.0\.113\.9"):
        TransferEngine("tcp", bind_address="203.0.113.9")


def test_errors_name_call_code_provider_and_peer(library):
    error = calls.fabric_error(library, "fi_writedata", -107, "tcp", "decode-1", posted=True)
    assert isinstance(error, PeerLost)
    assert str(error).startswith("fi_writedata on tcp towards decode-1 failed: ") and str(error).endswith("(error 107)")
    with pytest.raises(FabricError, match="fi_mr_reg on shm failed"):
        calls.check(library, "fi_mr_reg", -22, "shm")
    assert calls.check(library, "fi_mr_reg", 3) == 3


def test_what_tcp_was_called_in_1_17(library):
    old = dll.FabricLibrary(library.path, (1, 17), library.lib)
    assert info.library_name(info.PROFILES["tcp"], old) == "net"
    assert info.library_name(info.PROFILES["tcp"], library) == ("tcp" if library.version >= (1, 18) else "net")


def test_shm_does_not_connect_a_process_with_itself(library):
    with TransferEngine("shm") as one, TransferEngine("shm") as two:
        address = two.open_link().address
        with pytest.raises(ValueError, match="loopback"):
            one.open_link().connect(address, window=1)


def test_leftovers_are_removed_of_the_dead_only(tmp_path):
    dead = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    for name in (f"{dead}:{os.getuid()}:0", f"{dead}:{os.getuid()}:12", f"{dead}1:{os.getuid()}:0", "other"):
        (tmp_path / name).touch()
    assert remove_leftovers(dead, tmp_path) == 2
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ValueError, match="alive"):
        remove_leftovers(os.getpid(), tmp_path)


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_an_idle_engine_costs_next_to_nothing(library, provider):
    with TransferEngine(provider) as engine:
        link = engine.open_link()
        time.sleep(0.1)
        start = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - start < 0.5 * 0.04
        link.close()
