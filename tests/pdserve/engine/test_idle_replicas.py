"""Replicas that share experts step together; one that has nothing to do must not seem to compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pdserve.attention.batch import RaggedBatch
from pdserve.config import EngineSettings
from pdserve.parallel.gloo import RankLayout
from tests.pdserve.engine.rank_processes import node_of
from tests.pdserve.models.tiny_families import make_tiny

SETTINGS = EngineSettings(dtype="fp32", page_size=8, chunk_tokens=16, max_batch=4, kv_cache_tokens=64)
BATCH = RaggedBatch(np.array([5, 6]), np.array([0, 2]), np.array([0]), np.array([[0]]), np.array([1]))


def test_only_the_replica_whose_step_it_is_counts_layers(tmp_path: Path) -> None:
    directory = make_tiny("deepseek", tmp_path / "model")
    with node_of(RankLayout(dp=2, ep=True), directory, SETTINGS) as (ranks, _):
        layers = ranks.config.layers
        for replica, expected in ((0, (layers, 0)), (1, (layers, layers)), (0, (2 * layers, layers))):
            ranks.forward(replica, BATCH)
            assert tuple(int(model.layer_counter[0]) for model in ranks.replicas) == expected
