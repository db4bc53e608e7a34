"""`pdserve bench transport`: reads what is asked for, waits for a quiet machine, measures, prints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdserve.bench.transport.child_process import SideFailed
from pdserve.bench.transport.machine import configuration_of
from pdserve.bench.transport.opening import open_all
from pdserve.bench.transport.plan import KIB, MIB, SECTIONS, Plan, cpus_of_sides, size_bytes
from pdserve.bench.transport.plot import plot
from pdserve.bench.transport.quiet import LIMIT_CORES, Gate
from pdserve.bench.transport.records import Figures
from pdserve.bench.transport.report import report as tables
from pdserve.bench.transport.sections import Run, run_sections

DEFAULT_PORT = 7470
DEFAULT_WIRES = ("tcp", "shm", "ucx")
EXIT_FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.listen is not None:
        from pdserve.bench.transport.listen import listen

        listen(_address(parser, options.listen, "0.0.0.0"), _say)
        return 0
    plan = _plan(parser, options)
    try:
        _measure(plan, options)
    except SideFailed as error:
        _say(str(error))
        return EXIT_FAILED
    return 0


def _measure(plan: Plan, options: argparse.Namespace) -> None:
    gate = Gate(options.wait_quiet, _say)
    gate.before_section()
    contestants = open_all(plan, _say)
    try:
        configuration = configuration_of(plan, contestants)
        figures = run_sections(Run(plan, contestants, gate, _say))
    finally:
        contestants.close()
    configuration["busy_cores_before_sections"] = [round(look, 2) for look in gate.looks]
    _write(figures, configuration, options)


def _write(figures: Figures, configuration: dict[str, Any], options: argparse.Namespace) -> None:
    print("\n".join(f"{name}: {value}" for name, value in configuration.items()))
    print()
    print(tables(figures))
    if options.json is not None:
        options.json.write_text(json.dumps(figures.document(configuration), indent=1))
    if options.plot is not None:
        plot(figures, configuration, options.plot)


def _plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Plan:
    wires = tuple(options.wires or (DEFAULT_WIRES if options.connect is None else ("tcp",)))
    plan = Plan(
        wires,
        wires_asked=bool(options.wires or options.connect),
        sections=tuple(name for name in SECTIONS if name in options.only),
        rounds=options.rounds,
        window=options.window,
        total_bytes=options.mib * MIB,
        cpus=((), ()) if options.no_pinning else cpus_of_sides(),
        peers_python=_peers_python(options.peers),
        programs=options.peers is not None,
        fabtests=options.fabtests,
        connect=None if options.connect is None else _address(parser, options.connect, ""),
        nics=tuple(options.nics),
        their_nics=tuple(options.their_nics),
    )
    if options.quick:
        plan = replace(
            plan, rounds=3, total_bytes=32 * MIB, pages_bytes=(16 * KIB, 64 * KIB), singles_bytes=(MIB,), trips=200,
            immediates=5_000, loopback_blocks=200_000, idle_s=1.0, wake_ups=5,
        )  # fmt: skip
    if options.pages:
        plan = replace(plan, pages_bytes=tuple(options.pages))
    if options.singles:
        plan = replace(plan, singles_bytes=tuple(options.singles))
    if too_long := [size for size in (*plan.pages_bytes, *options.singles) if size > plan.total_bytes]:
        parser.error(f"blocks of {max(too_long)} bytes do not fit {plan.total_bytes >> 20} MiB: raise --mib")
    return plan


def _peers_python(asked: str | None) -> str | None:
    """The interpreter that has the other libraries: the one named, else that of `make bench`, else this one."""
    if asked != "":
        return asked
    beside = Path(f"{sys.prefix}-peers") / "bin" / "python"
    return str(beside) if beside.exists() else sys.executable


def _address(parser: argparse.ArgumentParser, text: str, default_host: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if ":" in text else (text, "", "")
    if text.isdigit():
        host, port = "", text
    if not (host or default_host) or not (port or str(DEFAULT_PORT)).isdigit():
        parser.error(f"{text!r} is no HOST or HOST:PORT")
    return host or default_host, int(port or DEFAULT_PORT)


def _sections(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"no section {unknown[0]!r}; there are: {', '.join(SECTIONS)}")
    return names


def _size(text: str) -> int:
    try:
        return size_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 65536, 64KiB or 1MiB") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdserve bench transport", description="Bytes between two processes: ours, the bare loops, and others."
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="32 MiB, 3 rounds, few sizes: a look, not a measurement")
    add("--only", type=_sections, default=list(SECTIONS), metavar="A,B", help=f"of: {', '.join(SECTIONS)}")
    add("--wires", nargs="+", metavar="PROVIDER", help=f"default: {' '.join(DEFAULT_WIRES)}; tcp between two hosts")
    add("--pages", nargs="+", type=_size, default=[], metavar="SIZE", help="page sizes, as 64KiB")
    add("--singles", nargs="+", type=_size, default=[], metavar="SIZE", help="sizes of single writes")
    add("--rounds", type=_positive, default=9, help="of each contestant at each size (default: %(default)s)")
    add("--mib", type=_positive, default=128, help="memory of each side (default: %(default)s)")
    add("--window", type=_positive, default=128, help="outstanding writes (default: %(default)s)")
    add(
        "--nics",
        nargs="+",
        default=[],
        metavar="NIC",
        help="NICs here: names or addresses; the first is used alone too",
    )
    add(
        "--their-nics",
        nargs="+",
        default=[],
        metavar="NIC",
        help="NICs of the receiver, where they are called otherwise",
    )
    add("--no-pinning", action="store_true", help="leave the sides to the scheduler")
    peers = (
        "also NIXL and Mooncake, from the interpreter PYTHON (default: that of `make bench`), fabtests, ucx_perftest"
    )
    add("--peers", nargs="?", const="", metavar="PYTHON", help=peers)
    add("--fabtests", metavar="DIR", help="where fi_rma_bw and ucx_perftest are, if not on PATH")
    quiet = f"wait while more than {LIMIT_CORES} cores are busy, so long in all (if not said: %(const)s s)"
    add("--wait-quiet", nargs="?", type=float, const=600.0, default=0.0, metavar="SECONDS", help=quiet)
    add("--listen", nargs="?", const=str(DEFAULT_PORT), metavar="[HOST:]PORT", help="be the other host, until Ctrl-C")
    add("--connect", metavar="HOST[:PORT]", help="the receivers run there, where --listen does")
    add("--json", type=Path, metavar="FILE", help="also write configuration and figures")
    add("--plot", type=Path, metavar="FILE", help="also draw them: .png, .svg or .pdf")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
