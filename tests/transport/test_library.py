"""Loading libfabric, choosing a provider, and what is said when that fails."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from transport import dll
from transport.engine import TransferEngine
from transport.errors import LibraryMissing, PeerLost, ProviderUnavailable
from transport.fabric import calls, info
from transport.fabric.leftovers import remove_leftovers
from transport.open import open_transport


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


@pytest.mark.parametrize("name", ["verbs", "pigeon"])
def test_providers_without_a_profile(name):
    with pytest.raises(ProviderUnavailable, match=f"'{name}'.*(choose of|Supported): efa"):
        TransferEngine(name)


def test_available_providers(library):
    assert {"tcp", "shm"} <= set(info.available(library))


def test_an_engine_takes_the_nics_that_it_is_given(library):
    with TransferEngine("tcp", nics=("127.0.0.1",)) as engine:
        (name,) = engine.open_link().address.names
        assert name[4:8] == bytes([127, 0, 0, 1])
    with pytest.raises(ProviderUnavailable, match=r"no interface .* 203\.0\.113\.9"):
        TransferEngine("tcp", nics=("203.0.113.9",))


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_a_transport_by_the_name_of_its_provider(library, provider):
    transport = open_transport(provider, library=library.path)
    assert transport.provider == provider and library.path in transport.description
    transport.close()


def test_transports_that_cannot_be_opened(tmp_path):
    with pytest.raises(LibraryMissing, match="pip install mpich"):
        open_transport("tcp", library=str(tmp_path / "libfabric.so.1"))
    with pytest.raises(ProviderUnavailable, match="'pigeon'"):
        open_transport("pigeon")


def test_the_reason_for_a_library_is_told(library):
    assert library.reason and library.reason in str(library) and library.path in str(library)
    assert "as configured" in str(dll.load_libfabric(library.path))


def test_settings_that_are_made_already_stand(library, monkeypatch):
    monkeypatch.setenv("FI_UNIVERSE_SIZE", "77")
    monkeypatch.delenv("FI_EFA_ENABLE_SHM_TRANSFER", raising=False)
    dll._open(library.path, "")
    assert (os.environ["FI_UNIVERSE_SIZE"], os.environ["FI_EFA_ENABLE_SHM_TRANSFER"]) == ("77", "0")


def test_a_library_without_a_provider_points_to_one_that_has_it(library, tmp_path, monkeypatch):
    wheel = tmp_path / "libfabric.so.1"
    monkeypatch.setattr(dll, "wheel_candidates", lambda: [wheel])
    assert dll.remedy(library, "sockets") == ""
    wheel.touch()
    assert dll.remedy(library, "sockets") == f"; the mpich wheel's library has it: configure {wheel}"
    monkeypatch.setattr(dll, "_RDMA_DEVICES", tmp_path / "infiniband")
    assert "no RDMA device" in dll.remedy(library, "efa")
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert dll.remedy(library, "efa") == ""
    (tmp_path / "libfabric").mkdir()
    (tmp_path / "libfabric" / "libefa-fi.so").touch()
    assert "the mpich wheel's library has it" in dll.remedy(library, "efa")


def test_errors_name_call_code_provider_and_peer(library):
    where = calls.Place("tcp", "eth0", "decode-1")
    error = calls.fabric_error(library, "fi_writedata", -107, where, posted=True)
    assert isinstance(error, PeerLost)
    assert str(error).startswith("fi_writedata on tcp through eth0 towards decode-1 failed: ")
    assert str(error).endswith("(error 107)")
    assert str(calls.fabric_error(library, "fi_mr_reg", -22, "shm")).startswith("fi_mr_reg on shm failed")


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
