from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import pdserve
from pdserve.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def keep_signal_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a wrong command line gets, before anything starts."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pdserve: ") and captured.err.count("\n") == 1
    return captured.err.removeprefix("pdserve: ").strip()


def test_version_and_help_answer_at_once() -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "pdserve", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert run("--version") == f"pdserve {pdserve.__version__}\n"
    started_s = time.perf_counter()
    text = run("--help")
    assert time.perf_counter() - started_s < 2.0  # 0.1 s on a quiet machine; importing torch or ray takes longer
    assert all(command in text for command in ("serve", "demo", "chat", "bench"))


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from pdserve.cli import _parser; _parser().format_help();"
        "print({'torch', 'ray', 'numba', 'pydantic'} & sys.modules.keys())"
    )
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout == "set()\n"


@pytest.mark.parametrize("command", ["serve", "demo", "chat"])
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: pdserve {command}" in capsys.readouterr().out


def test_bench_lists_its_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert main(["bench"]) == 2
    assert "{transport,serve,ranks}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "fp8"], "engine.dtype (from the command line): got 'fp8', allowed: bf16, fp32"),
        (["--set", "engine.page_sise=16"], "unknown key engine.page_sise (from the command line); did you mean"),
        (["--set", "engine.dtype"], "'engine.dtype' is not of the form key=value"),
        (["--port", "70000"], "http.port (from the command line): got 70000, allowed: a whole number, at least 0"),
        (["--prefill", "0"], "deployment: prefill (0) and decode (1) must both be at least 1"),
        (["--prefill", "1", "--colocated", "1"], "deployment: colocated (1) excludes prefill (1) and decode (1)"),
        (["--config", "absent.yaml"], "absent.yaml: cannot be read: No such file or directory"),
        (["/no/such/model"], "model.path: no directory '/no/such/model' here; allowed: a local Hugging Face directory"),
    ],
)
def test_wrong_settings_end_serve_at_once(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert refused(capsys, "serve", *arguments).startswith(message)


def test_flags_override_sets_which_override_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("engine: {dtype: x}\nhttp: {port: -1}\ndeployment: {decode: -1}")
    text = refused(
        capsys, "serve", "--config", str(file), "--set", "engine.dtype=y", "--set", "http.port=-2", "--dtype", "z"
    )
    assert text.startswith(f"{file}: ")
    assert "got 'z'" in text and "got -2" in text and "deployment.decode: got -1" in text


def test_a_taken_port_is_told_before_nodes_start(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in refused(
            capsys, "serve", "--port", str(port)
        )


def test_demo_checks_its_report_file_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/no/such is not a directory" in refused(capsys, "demo", "--json", "/no/such/report.json")


def test_unknown_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--decodes", "2"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --decodes" in capsys.readouterr().err


def test_chat_without_a_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert main(["chat", "--url", url]) == 1
    error = capsys.readouterr().err
    assert f"no server answers at {url}" in error and "pdserve serve" in error and error.count("\n") == 1
