"""`pdserve doctor` as it is called."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.cli import main
from pdserve.doctor.peer import DEFAULT_PORT

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def keep_signal_handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_this_machine_is_checked_and_reported_as_json():
    done = subprocess.run(
        [sys.executable, "-m", "pdserve", "doctor", "--json"], cwd=ROOT, capture_output=True, text=True
    )
    checks = json.loads(done.stdout)["checks"]
    statuses = {check["status"] for check in checks}
    assert statuses <= {"ok", "warn", "fail"} and done.returncode == int("fail" in statuses), done.stdout
    names = {check["name"] for check in checks}
    assert {"libfabric", "providers", "rdma-devices", "memlock", "dev-shm", "ipv6", "port http"} <= names
    assert all(check["found"] and (check["advice"] or check["status"] == "ok") for check in checks)


def test_text_has_a_line_per_check(capsys: pytest.CaptureFixture[str]):
    status = main(["doctor"])
    out = capsys.readouterr().out
    assert out.isascii() and "\033" not in out
    starts = [line.split()[0] for line in out.splitlines() if not line.startswith(" ")]
    assert set(starts[:-1]) <= {"ok", "warn", "fail"} and status == int("fail" in starts)


def test_settings_are_obeyed(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "cluster.yaml"
    file.write_text("http: {port: 0}")
    main(["doctor", "--json", "--config", str(file)])
    found = {check["name"]: check["found"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["port http"] == "any free one"


def test_a_library_that_is_none_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "libfabric.so.1"
    file.write_text("no library")
    assert main(["doctor", "--library", str(file)]) == 1
    assert f"cannot load libfabric from {file}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "absent.yaml"], "absent.yaml: cannot be read"),
        (["--library", "/no/such/file"], "--library: no file '/no/such/file'"),
        (["--provider", "tcp"], "--provider is of the transfer: give it together with --listen or --peer"),
        (["--listen", "127.0.0.1:x"], "'127.0.0.1:x': 'x' is no port; allowed: 0 to 65535"),
        (["--peer", ":7000"], "--peer: ':7000' names no host"),
        (["--peer", "localhost", "--provider", "pigeon"], "--provider: 'pigeon' does not open here; allowed: auto, "),
    ],
)
def test_wrong_arguments_are_told(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    assert main(["doctor", *arguments]) == 2
    assert f"pdserve: {message}" in capsys.readouterr().err


def test_help_names_the_default_port(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    out = capsys.readouterr().out
    assert str(DEFAULT_PORT) in out and "usage: pdserve doctor" in out
