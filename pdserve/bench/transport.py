"""How fast pages move between two processes of this machine: our engine, the bare loop below it, and its peers.

    python -m pdserve.bench.transport --quick
    python -m pdserve.bench.transport --peers-python /path/to/venv/bin/python --json out.json

Every contestant is a pair of processes that stay up; rounds are interleaved in a new order each time, so that a drift
of the machine hits all alike. The clock runs from the command to both sides until both have seen the end: the sender
its completions, the receiver its last immediate (or the peer's own notification). Page order is random on both sides,
and each pair must pass a comparison of all bytes before it is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pdserve.bench.transport_sides import PEERS, SEED, WINDOW

PAGES_BYTES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)


@dataclass(frozen=True, slots=True)
class Result:
    """Bandwidth of one contestant at one page size, in GB/s over the rounds."""

    contestant: str
    wire: str
    page_bytes: int
    median_gbps: float
    min_gbps: float
    max_gbps: float
    rounds: int


class Child:
    def __init__(self, python: str, name: str, wire: str, total_bytes: int, sends: bool) -> None:
        program = str(Path(__file__).with_name("transport_sides.py"))
        command = [python, program, name, wire, str(total_bytes), "sends" if sends else "receives"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def ask(self, method: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump((method, arguments), self._process.stdin)
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Pair:
    """A contestant on one wire: its sender and its receiver."""

    def __init__(self, python: str, name: str, wire: str, total_bytes: int) -> None:
        self.name, self.wire, self.total_bytes = name, wire, total_bytes
        self._number = 0
        self._children = [Child(python, name, wire, total_bytes, sends) for sends in (True, False)]
        try:
            here, there = self._both("start")
            sender, receiver = self._children
            receiver.ask("meet", here)
            receiver.answer()
            sender.ask("meet", there)
            sender.answer()
        except (RuntimeError, EOFError, OSError):
            self.close()
            raise

    def verify(self, page: int) -> float:
        """One pass, as `time`. Raises RuntimeError if a byte is wrong."""
        sender, receiver = self._children
        sender.ask("fill", page)
        sender.answer()
        timed = self.time(page)
        receiver.ask("verify", page, self._number)
        if not receiver.answer():
            raise RuntimeError(f"{self.name} on {self.wire} moved wrong bytes at {page} bytes a page")
        return timed

    def time(self, page: int) -> float:
        """GB/s of one pass over all pages."""
        self._number += 1
        start = time.perf_counter()
        self._both("run", page, self._number)
        return self.total_bytes / (time.perf_counter() - start) / 1e9

    def close(self) -> None:
        for child in self._children:
            child.close()

    def _both(self, method: str, *arguments: Any) -> list[Any]:
        for child in reversed(self._children):
            child.ask(method, *arguments)
        return [child.answer() for child in self._children]


def measure(pairs: list[Pair], pages: tuple[int, ...], rounds: int) -> list[Result]:
    """Verifies, warms up and times every pair at every page size, interleaved. A peer that fails is left out."""
    results = []
    shuffle = random.Random(SEED).shuffle
    for page in pages:
        pairs[:] = [pair for pair in pairs if _tried(pair, Pair.verify, page)]
        samples: dict[Pair, list[float]] = {pair: [] for pair in pairs}
        for _ in range(rounds):
            shuffle(pairs)
            for pair in list(pairs):
                if (timed := _tried(pair, Pair.time, page)) is None:
                    pairs.remove(pair)
                else:
                    samples[pair].append(timed)
        results += [
            Result(pair.name, pair.wire, page, statistics.median(got), min(got), max(got), len(got))
            for pair, got in samples.items()
            if got
        ]
    return results


def _tried(pair: Pair, work: Callable[[Pair, int], float], page: int) -> float | None:
    """What the work gave; None, and the pair is closed, if it failed. One of ours that fails ends the benchmark."""
    try:
        return work(pair, page)
    except (RuntimeError, EOFError, OSError) as error:
        if pair.name not in PEERS:
            raise
        print(f"{pair.name} on {pair.wire} is left out from here on: {error}", file=sys.stderr)
        pair.close()
        return None


def open_pairs(peers_python: str | None, wires: tuple[str, ...], total_bytes: int) -> list[Pair]:
    pairs = [Pair(sys.executable, name, wire, total_bytes) for wire in wires for name in ("engine", "raw")]
    if peers_python is not None:
        for name, reach in PEERS.items():
            for wire in (wire for wire in wires if wire in reach):
                try:
                    pairs.append(Pair(peers_python, name, wire, total_bytes))
                except (RuntimeError, EOFError, OSError) as error:
                    print(f"{name} on {wire} is left out: {error or 'it does not start'}", file=sys.stderr)
    return pairs


def table(results: list[Result]) -> str:
    lines = ["| page | wire | contestant | GB/s median | min | max |", "|---|---|---|---|---|---|"]
    for r in sorted(results, key=lambda r: (r.page_bytes, r.wire, -r.median_gbps)):
        size = f"{r.page_bytes >> 10} KiB"
        figures = f"{r.median_gbps:.2f} | {r.min_gbps:.2f} | {r.max_gbps:.2f}"
        lines.append(f"| {size} | {r.wire} | {r.contestant} | {figures} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Bandwidth of paged writes between two processes.")
    parser.add_argument("--quick", action="store_true", help="32 MiB, 3 rounds, two page sizes")
    parser.add_argument("--peers-python", help="interpreter with nixl-cu12 and/or mooncake-transfer-engine-non-cuda")
    parser.add_argument("--wires", nargs="+", default=["tcp", "shm"], choices=["tcp", "shm"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="also write configuration and results to this file")
    options = parser.parse_args(arguments)
    total = (32 if options.quick else 128) << 20
    rounds = 3 if options.quick else options.rounds
    pages = PAGES_BYTES[1:3] if options.quick else PAGES_BYTES
    configuration = {
        "total_mib": total >> 20,
        "window": WINDOW,
        "rounds": rounds,
        "order": "random on both sides",
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_before": os.getloadavg()[0],
    }
    pairs = open_pairs(options.peers_python, tuple(options.wires), total)
    try:
        results = measure(pairs, pages, rounds)
    finally:
        for pair in pairs:
            pair.close()
    print(json.dumps(configuration))
    print(table(results))
    if options.json:
        document = {"configuration": configuration, "results": [asdict(result) for result in results]}
        Path(options.json).write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
