"""Contestants that are a pair of processes: asked, verified and timed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from pdserve.bench.transport.child_process import Child, SideFailed
from pdserve.bench.transport.load import Load


@dataclass(frozen=True, slots=True)
class Round:
    """What one round took. `cpu_s` is (sender, receiver); None where the contestant cannot tell."""

    seconds: float
    cpu_s: tuple[float, float] | None = None


class Pair:
    """A system over a provider: its sender here and its receiver, here or on another host.

    `about` is what the sender says of itself, `modes` how it can be pinged. Takes the sides over. Raises SideFailed.
    """

    def __init__(self, system: str, provider: str, sides: tuple[Child, Child]) -> None:
        self.system, self.provider = system, provider
        self._sides = sender, receiver = sides
        self._number = 0
        try:
            here, there = self.both("start")
            self.about: str = here["about"]
            self.modes: tuple[str, ...] = tuple(here.get("modes", ()))
            # In turn: some connect while they meet.
            for side, other in ((receiver, here), (sender, there)):
                side.ask("meet", other)
                side.answer()
        except Exception:
            self.close()
            raise

    def verify(self, load: Load) -> Round:
        """One round, after which all bytes are compared. Raises SideFailed if one is wrong."""
        if load.kind == "immediate":
            return self.round(load)
        self.both("fill", *_numbers(load))
        measured = self.round(load)
        receiver = self._sides[1]
        receiver.ask("verify", *_numbers(load), self._number)
        if not receiver.answer():
            raise SideFailed(f"{self.system} on {self.provider} moved wrong bytes: {load}")
        return measured

    def round(self, load: Load) -> Round:
        self._number += 1
        self.both("prepare", *_numbers(load), self._number)
        begun = time.perf_counter()
        sender_s, receiver_s = self.both("run")
        return Round(time.perf_counter() - begun, (sender_s, receiver_s))

    def post(self, load: Load) -> float:
        """Seconds that the caller of the sender spent on submitting the round."""
        self._number += 1
        self.both("prepare", *_numbers(load), self._number)
        return float(self.each(("post",), ("run",))[0])

    def both(self, method: str, *arguments: Any) -> list[Any]:
        """Answers of (sender, receiver)."""
        self.ask_both(method, *arguments)
        return self.answers()

    def ask_both(self, method: str, *arguments: Any) -> None:
        """The receiver first. `answers` takes what they say."""
        for side in reversed(self._sides):
            side.ask(method, *arguments)

    def each(self, sender: tuple[Any, ...], receiver: tuple[Any, ...]) -> list[Any]:
        """Different questions; answers of (sender, receiver)."""
        self._sides[1].ask(*receiver)
        self._sides[0].ask(*sender)
        return self.answers()

    def answers(self) -> list[Any]:
        return [side.answer() for side in self._sides]

    def close(self) -> None:
        for side in self._sides:
            side.close()


def _numbers(load: Load) -> tuple[str, int, int]:
    return load.kind, load.block_bytes, load.blocks
