"""`pdserve bench serve`: prefill/decode against colocated under the same load, with equal cores on both sides.

Both systems have two cores: one prefill and one decode node, or two colocated nodes behind the same router. Rounds of
the two alternate; each round has a fresh cluster and a warm-up that is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from actors.launch import launch
from pdserve.bench.load import Load, Measured, run_load
from pdserve.config import Settings, load_settings, parse_override
from pdserve.workload.server_client import ServerClient
from pdserve.workload.summary import Summary

SYSTEMS: dict[str, dict[str, Any]] = {
    "prefill/decode": {"deployment.prefill": 1, "deployment.decode": 1},
    "colocated": {"deployment.prefill": 0, "deployment.decode": 0, "deployment.colocated": 2},
}
DEFAULT = Load()
WARM_UP = Load(streams=2, stream_output=8, long_every_s=2.0, window_s=2.0)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    load = Load(streams=arguments.streams, window_s=arguments.window, long_every_s=arguments.long_every)
    overrides = dict(parse_override(text) for text in arguments.overrides)
    print(f"two cores each, {os.cpu_count()} here; load: {load}")
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
    for number in range(arguments.rounds):
        for name, deployment in SYSTEMS.items():
            settings = load_settings(None, {"http.port": 0, "deployment.pin_cores": True} | deployment | overrides)
            measured = _measure(settings, load, number)
            rounds[name].append(_figures(measured))
            print(f"round {number + 1}, {name:<15} {_line(rounds[name][-1])}", flush=True)
    for name, figures in rounds.items():
        middle = {key: median(row[key] for row in figures) for key in figures[0]}
        print(f"median,  {name:<15} {_line(middle)}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"load": asdict(load), "rounds": rounds}, indent=1))
    return 1 if any(row["errors"] for figures in rounds.values() for row in figures) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdserve bench serve", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each system (default: %(default)s)")
    parser.add_argument("--window", type=float, default=DEFAULT.window_s, help="seconds of load (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=DEFAULT.streams, help="streams at once (default: %(default)s)")
    parser.add_argument(
        "--long-every",
        type=float,
        default=DEFAULT.long_every_s,
        help="seconds between long prompts (default: %(default)s)",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures")
    return parser


def _measure(settings: Settings, load: Load, seed: int) -> Measured:
    with launch(settings) as cluster:
        client = ServerClient(cluster.url)
        run_load(client, cluster.model_name, WARM_UP, seed + 1_000)
        return run_load(client, cluster.model_name, load, seed)


def _figures(measured: Measured) -> dict[str, Any]:
    between, short, long = (
        Summary.of(values) for values in (measured.inter_token, measured.stream_ttft, measured.long_ttft)
    )
    return {
        "tokens_per_s_per_stream": median(measured.stream_rate) if measured.stream_rate else 0.0,
        "itl_p50_ms": between.median * 1e3,
        "itl_p99_ms": between.p99 * 1e3,
        "itl_max_ms": between.max * 1e3,
        "stream_ttft_p50_ms": short.median * 1e3,
        "stream_ttft_p99_ms": short.p99 * 1e3,
        "long_ttft_p50_ms": long.median * 1e3,
        "output_tokens": measured.tokens,
        "errors": len(measured.errors),
    }


def _line(figures: dict[str, Any]) -> str:
    return "  ".join(f"{key} {value:.1f}" for key, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
