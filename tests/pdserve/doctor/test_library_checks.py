"""What is found of libfabric and libucp, and what is said about it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.config import load_settings
from pdserve.doctor.checks import libraries
from pdserve.doctor.libraries import Libraries, Library, find_libraries, probe
from pdserve.doctor.report import Status
from tests.pdserve.doctor.made_up import FABRIC, UCP
from tests.transport import fake_sysfs
from transport.dll import load_libfabric
from transport.errors import LibraryMissing

OLD = Library("system", "/usr/lib/x86_64-linux-gnu/libfabric.so.1", "1.17", ("tcp", "shm"))
ABSENT = Library("", "", error="libfabric is neither on the system nor in this environment")
TCP_ONLY = replace(FABRIC, providers=("tcp", "shm"))


def test_the_taken_libfabric_is_told_and_the_others_too(plain):
    check = libraries.libfabric(plain.system(libraries=Libraries(FABRIC, UCP, (OLD,))))
    assert check.status is Status.OK
    assert check.found == f"2.5 from {FABRIC.path} (system); not taken: 1.17 from {OLD.path} (system)"


@pytest.mark.parametrize(("found", "status"), [(OLD, "warn"), (ABSENT, "fail")])
def test_an_old_or_absent_libfabric(plain, found, status):
    check = libraries.libfabric(plain.system(libraries=Libraries(found, UCP)))
    assert check.status == status and "pip install mpich" in check.advice


def test_no_provider_fails(plain):
    for found in (ABSENT, replace(FABRIC, providers=())):
        assert libraries.providers(plain.system(libraries=Libraries(found, UCP))).status is Status.FAIL


def test_the_configured_provider_must_open(plain):
    settings = load_settings(None, {"transport.provider": "sockets"})
    check = libraries.providers(plain.system(settings=settings, environment={"FI_PROVIDER": "tcp"}))
    assert check.status is Status.FAIL and "transport.provider is sockets" in check.advice
    assert "FI_PROVIDER=tcp" in check.advice


@pytest.mark.parametrize(
    ("shape", "status", "advice"),
    [
        (fake_sysfs.p5, "fail", "rdmap79s0 needs the provider efa"),
        (fake_sysfs.dgx_h100, "fail", "mlx5_0 needs the provider verbs;ofi_rxm"),
        (fake_sysfs.soft_roce, "warn", "rxe0 needs the provider verbs;ofi_rxm"),
        (fake_sysfs.plain_server, "ok", ""),
    ],
)
def test_the_provider_of_the_nics_must_open(machine, shape, status, advice):
    found = machine(shape)
    check = libraries.providers(found.system(libraries=Libraries(TCP_ONLY, UCP)))
    assert check.status == status and advice in check.advice
    assert libraries.providers(found.system()).status is Status.OK


def test_ucx_that_is_configured_needs_libucp(plain):
    settings = plain.system().settings
    asked = settings.model_copy(update={"transport": settings.transport.model_copy(update={"provider": "ucx"})})
    assert libraries.providers(plain.system(settings=asked)).status is Status.OK
    check = libraries.providers(plain.system(settings=asked, libraries=Libraries(FABRIC, ABSENT)))
    assert check.status is Status.FAIL and "no libucp" in check.advice


def test_libucp_is_wanted_for_the_fallback_only(plain):
    assert libraries.libucp(plain.system()).status is Status.OK
    check = libraries.libucp(plain.system(libraries=Libraries(FABRIC, ABSENT)))
    assert check.status is Status.WARN and "libucx-cu12" in check.advice


def test_what_this_machine_has_is_what_a_node_would_take():
    try:
        library = load_libfabric()
    except LibraryMissing as error:
        pytest.skip(str(error))
    found = find_libraries()
    assert (found.fabric.path, found.fabric.version) == (library.path, ".".join(map(str, library.version)))
    assert found.fabric.source in ("system", "mpich wheel") and "tcp" in found.fabric.providers
    assert find_libraries(library.path).fabric == replace(found.fabric, source="given")


@pytest.mark.parametrize(
    ("content", "told"), [(None, "cannot load libfabric from"), (b"no library", "invalid ELF header|file too short")]
)
def test_a_given_path_that_is_no_library(tmp_path, content, told):
    path = tmp_path / "libfabric.so.1"
    if content is not None:
        path.write_bytes(content)
    found = probe("libfabric", "given", str(path))
    assert re.search(told, found.error) and found.source == "given"


def test_a_library_that_ends_its_process_ends_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A child that dies stands for a library whose constructor crashes."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nkill -SEGV $$\n")
    broken.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(broken))
    assert "ended its process (signal 11)" in probe("libucp", "system", "libucp.so.0").error
