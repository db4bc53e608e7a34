"""One function for each section of the benchmark: what it runs on the open contestants, and the rows that it adds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.bench.transport import records
from pdserve.bench.transport.contest import Contest, Series, is_ours
from pdserve.bench.transport.load import SEED, Kind, Load
from pdserve.bench.transport.loopback import BLOCK_BYTES, loopback_rounds
from pdserve.bench.transport.opening import Contestants, Report
from pdserve.bench.transport.pair import Pair
from pdserve.bench.transport.plan import Plan
from pdserve.bench.transport.quiet import Gate
from pdserve.bench.transport.records import Figures

WARM_UP_TRIPS = 100
POSTED_BLOCK_BYTES = 1024
POSTS_PER_ROUND = 3
WAKE_UP_PAUSE_S = 0.2
STATES = ("open", "armed")


@dataclass(slots=True)
class Run:
    """A benchmark under way."""

    plan: Plan
    opened: Contestants
    gate: Gate
    report: Report
    figures: Figures = field(default_factory=Figures)

    @property
    def transports(self) -> list[Pair]:
        """Those with a worker thread and a queue."""
        return [pair for pair in self.opened.pairs if is_ours(pair.system) and pair.system != "raw"]

    def measure(self, loads: Sequence[Load], only: Callable[[str], bool] = bool) -> list[Series]:
        """Who fails is out for the sections that follow, too."""
        contest = Contest([*self.opened.movers], self.report, self.gate.before_round)
        try:
            return contest.measure(loads, self.plan.rounds, only)
        finally:
            self.opened.movers[:] = [mover for mover in self.opened.movers if mover in contest.contestants]


def run_sections(run: Run) -> Figures:
    """Raises SideFailed where one of ours fails."""
    for section in run.plan.sections:
        run.gate.before_section()
        run.report(f"{section} …")
        _SECTIONS[section](run)
    return run.figures


def _paged(run: Run) -> None:
    every = run.measure(_loads("paged", run.plan.pages_bytes, run.plan))
    run.figures.paged += records.bandwidth_rows(every)
    run.figures.cpu += records.cpu_rows(every)
    run.figures.shares += records.share_rows(every)


def _single(run: Run) -> None:
    every = run.measure(_loads("single", run.plan.singles_bytes, run.plan))
    run.figures.single += records.bandwidth_rows(every)
    run.figures.shares += records.share_rows(every)


def _loads(kind: Kind, sizes: Sequence[int], plan: Plan) -> list[Load]:
    return [Load.over(kind, size, plan.total_bytes) for size in sizes if size <= plan.total_bytes]


def _operations(run: Run) -> None:
    plan = run.plan
    every = run.measure([Load.over("paged", BLOCK_BYTES, plan.total_bytes)])
    every += run.measure([Load("immediate", 0, plan.immediates)], is_ours)
    looped = loopback_rounds(plan.loopback_blocks, plan.rounds)
    load = Load("paged", BLOCK_BYTES, plan.loopback_blocks)
    every.append(Series("loopback", "loopback", load, tuple(looped)))
    run.figures.operations += records.operation_rows(every)


def _latency(run: Run) -> None:
    """Bursts of all, interleaved; the trips of a contestant's bursts are taken together."""
    pinged = [(pair, mode) for pair in (*run.opened.pairs, *run.opened.probes) for mode in pair.modes]
    trips: dict[tuple[Pair, str], list[float]] = {key: [] for key in pinged}
    for pair, mode in pinged:
        _burst(pair, mode, WARM_UP_TRIPS)
    shuffle = random.Random(SEED).shuffle
    for _round in range(run.plan.rounds):
        run.gate.before_round()
        shuffle(pinged)
        for pair, mode in pinged:
            trips[pair, mode] += _burst(pair, mode, run.plan.trips)
    rows = [records.latency_row(pair.system, pair.provider, mode, got) for (pair, mode), got in trips.items()]
    run.figures.latency += sorted(rows, key=lambda row: (row["provider"], row["mode"], row["p50_us"]))


def _burst(pair: Pair, mode: str, trips: int) -> list[float]:
    """µs of each round trip."""
    pair.both("rest", "armed")
    times: list[float] = pair.each(("ping", mode, trips), ("pong", mode, trips))[0]
    pair.both("rest", "open")
    return times


def _post(run: Run) -> None:
    blocks_bytes = min(run.plan.total_bytes, run.plan.post_blocks * POSTED_BLOCK_BYTES)
    load = Load.over("paged", POSTED_BLOCK_BYTES, blocks_bytes)
    for pair in run.transports:
        seconds = [pair.post(load) for _round in range(1 + POSTS_PER_ROUND * run.plan.rounds)]
        run.figures.post_cost.append(records.post_cost_row(pair.system, pair.provider, load.blocks, seconds[1:]))


def _idle(run: Run) -> None:
    """All do nothing at once; then they are woken one after the other."""
    for state in STATES:
        for pair in run.transports if state == "armed" else ():
            pair.both("rest", state)
        for pair in run.transports:
            pair.ask_both("idle", run.plan.idle_s)
        shares = [max(pair.answers()) for pair in run.transports]
        for pair, share in zip(run.transports, shares, strict=True):
            woken = _woken(pair, state, run.plan.wake_ups) if run.plan.connect is None else []
            run.figures.idle.append(records.idle_row(pair.system, pair.provider, state, share, woken))
    for pair in run.transports:
        pair.both("rest", "open")


def _woken(pair: Pair, state: str, count: int) -> list[float]:
    """µs from the sender's call to the receiver's callback; both read the same clock."""
    called, heard = pair.each(("call", state, count, WAKE_UP_PAUSE_S), ("hear", state, count))
    return [after - before for before, after in zip(called, heard, strict=True)]


_SECTIONS: dict[str, Callable[[Run], None]] = {
    "paged": _paged,
    "single": _single,
    "operations": _operations,
    "latency": _latency,
    "post": _post,
    "idle": _idle,
}
