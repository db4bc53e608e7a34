import stat
import textwrap

import pytest

from pdserve.bench.transport.child_process import SideFailed
from pdserve.bench.transport.external import (
    FABTESTS,
    PERFTEST,
    External,
    Program,
    fabtests_rate,
    find_program,
    perftest_rate,
)
from pdserve.bench.transport.load import Load

LOAD = Load("paged", 65536, 512)
FABTESTS_SAYS = """bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec
64k     10k     =10k     625m        0.18s   3500.25      18.70       0.05
"""
PERFTEST_SAYS = """iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
5000,0.091,143.602,143.602,435.23,436.5,6964,6964
"""


def test_what_the_programs_print_is_read_in_their_units():
    assert fabtests_rate(FABTESTS_SAYS) == pytest.approx(3500.25e6)
    assert perftest_rate(PERFTEST_SAYS) == pytest.approx(436.5 * (1 << 20))
    for rate in (fabtests_rate, perftest_rate):
        with pytest.raises(ValueError, match="no figures"):
            rate("bytes   #sent\nit did not work\n")


def test_the_programs_are_told_size_number_window_and_port():
    command = FABTESTS.command("fi_rma_bw", "tcp", LOAD, 128, 7000)
    assert command[:5] == ["fi_rma_bw", "-p", "tcp", "-o", "writedata"]
    assert [command[command.index(flag) + 1] for flag in ("-S", "-I", "-W", "-B")] == ["65536", "4096", "128", "7000"]
    command = PERFTEST.command("ucx_perftest", "ucx", LOAD, 128, 7000)
    assert [command[command.index(flag) + 1] for flag in ("-t", "-s", "-n", "-O")] == [
        "ucp_put_bw", "65536", "4096", "128",
    ]  # fmt: skip


def _script(tmp_path, body):
    path = tmp_path / "fi_rma_bw"
    path.write_text("#!/bin/sh\n" + textwrap.dedent(body))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def _external(tmp_path, body):
    """A program of the shape of those that are run: without a host it serves, with one it prints figures."""
    _script(tmp_path, body)
    binary = find_program(FABTESTS, str(tmp_path))
    assert binary == str(tmp_path / "fi_rma_bw")
    program = Program(FABTESTS.system, FABTESTS.binary, ("tcp",), FABTESTS.command, fabtests_rate)
    return External(program, binary, "tcp", 128, ((), ()))


def test_a_program_is_run_as_server_and_client_and_its_own_figure_counts(tmp_path):
    body = f"""
    case "$*" in *127.0.0.1) printf '%s' '{FABTESTS_SAYS}' ;; *) exec sleep 30 ;; esac
    """
    measured = _external(tmp_path, body).round(LOAD)
    assert measured.seconds == pytest.approx(LOAD.total_bytes / 3500.25e6) and measured.cpu_s is None


def test_a_program_that_does_not_work_is_named_with_what_it_said(tmp_path):
    with pytest.raises(SideFailed, match="fabtests on tcp: the server ended with 3"):
        _external(tmp_path, "exit 3\n").round(LOAD)
    body = """
    case "$*" in *127.0.0.1) echo nonsense ;; *) exec sleep 30 ;; esac
    """
    with pytest.raises(SideFailed, match="fabtests on tcp: no figures in 'nonsense'"):
        _external(tmp_path, body).round(LOAD)


def test_a_program_that_is_not_installed_is_not_found(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program(PERFTEST) is None and find_program(PERFTEST, str(tmp_path)) is None
