"""Prefill steps that a test holds or breaks before one of their layers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pdserve.attention.batch import RaggedBatch
from pdserve.kv.memory import KvMemory
from tests.pdserve.engine.toy import ToyModel
from tests.pdserve.messenger.taps import PATIENCE_S


class SteppedModel(ToyModel):
    """Calls `before_layer(layer)` on prefill steps, before that layer is computed; what it raises fails the step."""

    def __init__(self, before_layer: Callable[[int], None]) -> None:
        super().__init__()
        self.before_layer = before_layer

    def forward(self, batch: RaggedBatch, cache: KvMemory, layer_counter: NDArray[np.int64]) -> NDArray[np.float32]:
        if len(batch.logit_rows):
            return super().forward(batch, cache, layer_counter)
        self.batches.append((0, batch.rows))
        for layer in range(self.config.layers):
            self.before_layer(layer)
            for sequence in range(batch.sequences):
                self._append(batch, cache.blocks[layer], sequence)
            layer_counter[0] += 1
        return np.empty((0, self.config.vocab), dtype=np.float32)


class LayerGate:
    """Holds every prefill step before one layer until `open` is set."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, layer: int) -> None:
        if layer == self._layer:
            self.reached.set()
            assert self.open.wait(PATIENCE_S)

    def wait(self) -> None:
        assert self.reached.wait(PATIENCE_S)
