"""Steps of replicas that share experts: whoever has a step takes the others along, be it with an empty batch."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pdserve.attention.batch import RaggedBatch
from pdserve.engine.ranks.steps import EMPTY_STEP

Logits = NDArray[np.float32]
Run = Callable[[dict[int, RaggedBatch]], dict[int, Logits]]


class Rounds:
    """`run` steps all replicas at once, and is never called twice at a time."""

    def __init__(self, run: Run, replicas: int) -> None:
        self._run = run
        self._replicas = replicas
        self._changed = threading.Condition()
        self._asked: dict[int, RaggedBatch] = {}
        self._done: dict[int, Logits | Exception] = {}
        self._running = False

    def step(self, replica: int, batch: RaggedBatch) -> Logits:
        """Blocks until a round with this batch has ended. Raises what the round raised."""
        with self._changed:
            self._asked[replica] = batch
            while replica not in self._done:
                if self._running:
                    self._changed.wait()
                else:
                    self._one_round()
            result = self._done.pop(replica)
        if isinstance(result, Exception):
            raise result
        return result

    def _one_round(self) -> None:
        """Takes along all who have asked by now; called, and returns, with the lock."""
        asked, self._asked = self._asked, {}
        self._running = True
        self._changed.release()
        results: dict[int, Logits | Exception]
        try:
            ran = self._run({replica: asked.get(replica, EMPTY_STEP) for replica in range(self._replicas)})
            results = {replica: ran[replica] for replica in asked}
        except Exception as error:
            results = dict.fromkeys(asked, error)
        self._changed.acquire()
        self._running = False
        self._done |= results
        self._changed.notify_all()
