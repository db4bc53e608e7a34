"""Rounds of all contestants, interleaved in a new order each time; no processes in here."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.bench.transport.child_process import SideFailed
from pdserve.bench.transport.load import SEED, Load
from pdserve.bench.transport.pair import Round

OURS = ("engine", "raw", "ucx")


class Contestant(Protocol):
    @property
    def system(self) -> str: ...
    @property
    def provider(self) -> str: ...
    def verify(self, load: Load) -> Round: ...
    def round(self, load: Load) -> Round: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Series:
    """The rounds of one contestant at one load. Round i was run beside round i of the others."""

    system: str
    provider: str
    load: Load
    rounds: tuple[Round, ...]

    @property
    def gb_per_s(self) -> list[float]:
        return [self.load.total_bytes / r.seconds / 1e9 for r in self.rounds]

    @property
    def per_s(self) -> list[float]:
        return [self.load.blocks / r.seconds for r in self.rounds]

    @property
    def cpu_s_per_gb(self) -> tuple[float, float] | None:
        """Medians over the rounds of (sender, receiver)."""
        told = [r.cpu_s for r in self.rounds if r.cpu_s is not None]
        if not told:
            return None
        gb = self.load.total_bytes / 1e9
        return statistics.median(s for s, _ in told) / gb, statistics.median(r for _, r in told) / gb


def is_ours(system: str) -> bool:
    return system.split("/")[0] in OURS


class Contest:
    """Measures contestants at loads. One of others that fails is closed and taken out of `contestants` for good.

    `report` takes what a person should know, `before_round` may wait for better times.
    """

    def __init__(
        self, contestants: list[Contestant], report: Callable[[str], None], before_round: Callable[[], None]
    ) -> None:
        self.contestants = contestants
        self._report, self._before_round = report, before_round
        self._shuffle = random.Random(SEED).shuffle

    def measure(self, loads: Sequence[Load], rounds: int, only: Callable[[str], bool] = bool) -> list[Series]:
        """Verifies, warms up and times, interleaved, whoever's system `only` lets in.

        Raises SideFailed where one of ours fails.
        """
        every = []
        for load in loads:
            for contestant in [c for c in self.contestants if only(c.system)]:
                self._tried(contestant, contestant.verify, load)
            taken: dict[Contestant, list[Round]] = {c: [] for c in self.contestants if only(c.system)}
            for _ in range(rounds):
                self._before_round()
                self._round(load, taken)
            every += [Series(c.system, c.provider, load, tuple(got)) for c, got in taken.items() if got]
        return every

    def _round(self, load: Load, taken: dict[Contestant, list[Round]]) -> None:
        order = [contestant for contestant in taken if contestant in self.contestants]
        self._shuffle(order)
        for contestant in order:
            measured = self._tried(contestant, contestant.round, load)
            if measured is not None:
                taken[contestant].append(measured)

    def _tried(self, contestant: Contestant, work: Callable[[Load], Round], load: Load) -> Round | None:
        try:
            return work(load)
        except SideFailed as error:
            if is_ours(contestant.system):
                raise
            self._report(f"left out from here on: {error}")
            contestant.close()
            self.contestants.remove(contestant)
            return None
