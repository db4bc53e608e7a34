"""`pdserve bench ranks`: reads what is asked for, measures, prints."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pdserve.bench.ranks.message import MessageTimes, measure_message, other_end
from pdserve.bench.ranks.random_model import SMALLEST, Shape, write_random
from pdserve.bench.ranks.steps import Plan, Round, measure_steps, systems_of
from pdserve.bench.transport.plan import cpus_of_sides
from pdserve.bench.transport.quiet import LIMIT_CORES, Gate
from pdserve.errors import PdserveError

EXIT_FAILED = 1
MESSAGES = 200
COLUMNS = (
    ("batch", "batch", "{:d}"), ("one rank ms", "one_rank_ms", "{:.2f}"), ("two ranks ms", "two_ranks_ms", "{:.2f}"),
    ("two / one", "two_over_one", "{:.2f}"), ("message us", "message_us", "{:.0f}"),
    ("of the step", "message_share", "{:.1%}"), ("collectives", "collectives", "{:.0f}"),
    ("gloo ms", "gloo_ms", "{:.2f}"), ("of the step", "gloo_share", "{:.0%}"),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    cores = () if options.no_pinning else tuple(cpus[0] for cpus in cpus_of_sides() if cpus)
    if len(cores) < 2:
        _say("warning: the ranks are not pinned to cores of their own; the figures say little")
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        shape = Shape(options.layers, options.hidden)
        plan = Plan(
            options.model or write_random(Path(folder) / "model", shape, options.dtype),
            options.dtype,
            options.rounds,
            options.steps,
            tuple(options.batches),
            options.context,
            (cores[0], cores[1]) if len(cores) == 2 else (None, None),
        )
        try:
            rows, looks = _measure(plan, options)
        except PdserveError as error:
            _say(f"pdserve bench ranks: {error}")
            return EXIT_FAILED
    configuration = _configuration(plan, "random" if options.model is None else str(options.model), shape, looks)
    _print(configuration, rows)
    if options.json is not None:
        options.json.write_text(json.dumps({"configuration": configuration, "steps": rows}, indent=1))
    return 0


def _measure(plan: Plan, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[float]]:
    gate = Gate(options.wait_quiet, _say)
    gate.before_section()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if plan.cores[0] is not None:
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {plan.cores[0]})
            stack.callback(os.sched_setaffinity, 0, before)
        with systems_of(plan) as systems:
            rounds = measure_steps(plan, systems, gate.before_round)
        line = stack.enter_context(other_end(plan.cores[1]))
        messages = {size: measure_message(line, plan.batch(size), MESSAGES) for size in plan.batches}
    return [_row(size, rounds[size], messages[size]) for size in plan.batches], gate.looks


def _row(batch: int, rounds: list[Round], message: MessageTimes) -> dict[str, Any]:
    """Ratios are medians of the rounds' own."""
    two_s = median(one.two_s for one in rounds)
    ratios = sorted(one.two_s / one.one_s for one in rounds)
    return {
        "batch": batch,
        "rounds": len(rounds),
        "one_rank_ms": median(one.one_s for one in rounds) * 1e3,
        "two_ranks_ms": two_s * 1e3,
        "two_over_one": median(ratios),
        "two_over_one_min": ratios[0],
        "two_over_one_max": ratios[-1],
        "message_bytes": message.size_bytes,
        "message_encode_us": message.encode_s * 1e6,
        "message_send_us": message.send_s * 1e6,
        "message_us": message.whole_s * 1e6,
        "message_share": message.whole_s / two_s,
        "collectives": median(one.collectives for one in rounds),
        "gloo_ms": median(one.gloo_s for one in rounds) * 1e3,
        "gloo_share": median(one.gloo_s / one.two_s for one in rounds),
    }


def _configuration(plan: Plan, model: str, shape: Shape, looks: list[float]) -> dict[str, Any]:
    return {
        "model": f"{model}, {shape}" if model == "random" else model,
        "dtype": plan.dtype,
        "context_tokens": plan.context_tokens,
        "rounds": plan.rounds,
        "steps_a_round": plan.steps,
        "cores_of_ranks": list(plan.cores),
        "messages": MESSAGES,
        "busy_cores_before": [round(look, 2) for look in looks],
    }


def _print(configuration: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    print("\n".join(f"{name}: {value}" for name, value in configuration.items()), end="\n\n")
    lines = [[title for title, _, _ in COLUMNS]]
    lines += [[text.format(int(row[key]) if key == "batch" else row[key]) for _, key, text in COLUMNS] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print(
        "\nmessage: encode, send, wake the other rank, decode; measured by itself. gloo: at the leader, with its"
        "\nwaiting for the other rank. Decode steps; medians of rounds that alternate; ratios are medians of ratios."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdserve bench ranks", description="A decode step by two tensor-parallel ranks against one rank."
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="a local Hugging Face directory (default: random weights)")
    add("--layers", type=_positive, default=Shape().layers, help="of the random model (default: %(default)s)")
    add("--hidden", type=_hidden, default=Shape().hidden, help="its width (default: %(default)s)")
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="default: %(default)s")
    add("--batches", type=_positive, nargs="+", default=[1, 8], metavar="N", help="default: 1 8")
    add("--context", type=_positive, default=128, help="tokens that every sequence has (default: %(default)s)")
    add("--rounds", type=_positive, default=9, help="of each (default: %(default)s)")
    add("--steps", type=_positive, default=30, help="of each batch size in a round (default: %(default)s)")
    add("--no-pinning", action="store_true", help="leave the ranks to the scheduler")
    quiet = f"wait while more than {LIMIT_CORES} cores are busy, so long in all (if not said: %(const)s s)"
    add("--wait-quiet", nargs="?", type=float, const=600.0, default=0.0, metavar="SECONDS", help=quiet)
    add("--json", type=Path, metavar="FILE", help="also write configuration and figures")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _hidden(text: str) -> int:
    if (hidden := _positive(text)) % SMALLEST:
        raise argparse.ArgumentTypeError(f"{hidden} is no multiple of {SMALLEST}: two ranks could not share the heads")
    return hidden


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
