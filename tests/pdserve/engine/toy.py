"""A tiny deterministic model that answers from its paged cache alone, so that a page mistake changes the answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pdserve.attention.batch import RaggedBatch
from pdserve.config import EngineSettings
from pdserve.engine.limits import page_geometry
from pdserve.kv.memory import KvMemory
from pdserve.models.api import ModelConfig
from pdserve.types import FinishReason, GenerationRequest, RequestId, SamplingParams

VOCAB = 97
EOS = 0
SETTINGS = EngineSettings(dtype="fp32", page_size=8, chunk_tokens=32, max_batch=8, kv_cache_tokens=512)


def toy_config(context: int = 256) -> ModelConfig:
    return ModelConfig(
        name="toy",
        fingerprint="toy",
        layers=2,
        hidden=4,
        intermediate=4,
        heads=1,
        kv_heads=1,
        head_dim=4,
        vocab=VOCAB,
        context=context,
        rope_theta=1e4,
        rms_eps=1e-5,
        tied_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(EOS,),
    )


class ToyModel:
    """Keys hold the token, values the position; the next token is a checksum of all keys in the pages."""

    def __init__(self, context: int = 256, *, before_step: Callable[[RaggedBatch], None] | None = None) -> None:
        self.config = toy_config(context)
        self.before_step = before_step
        self.batches: list[tuple[int, int]] = []  # (decode rows, other rows)

    def forward(self, batch: RaggedBatch, cache: KvMemory, layer_counter: NDArray[np.int64]) -> NDArray[np.float32]:
        self.batches.append((len(batch.logit_rows), batch.rows - len(batch.logit_rows)))
        if self.before_step is not None:
            self.before_step(batch)
        for layer in range(self.config.layers):
            for sequence in range(batch.sequences):
                self._append(batch, cache.blocks[layer], sequence)
            layer_counter[0] += 1
        logits = np.empty((len(batch.logit_rows), VOCAB), dtype=np.float32)
        for index, row in enumerate(batch.logit_rows):
            sequence = int(np.searchsorted(batch.row_start, row, side="right")) - 1
            logits[index] = logits_of(self._read(batch, cache, sequence, int(row)))
        return logits

    def _append(self, batch: RaggedBatch, blocks: NDArray[np.float32], sequence: int) -> None:
        page_size = blocks.shape[3]
        start, end = batch.row_start[sequence], batch.row_start[sequence + 1]
        for row in range(start, end):
            position = batch.first_position[sequence] + row - start
            page = batch.page_table[sequence, position // page_size]
            blocks[page, 0, 0, position % page_size] = batch.tokens[row]
            blocks[page, 1, 0, position % page_size] = position

    def _read(self, batch: RaggedBatch, cache: KvMemory, sequence: int, row: int) -> list[int]:
        last = int(batch.first_position[sequence] + row - batch.row_start[sequence])
        page_size = cache.geometry.page_size
        pages = batch.page_table[sequence, : last // page_size + 1]
        for layer in range(self.config.layers):
            values = cache.blocks[layer][pages, 1, 0].reshape(-1, 4)[: last + 1, 0]
            assert np.array_equal(values, np.arange(last + 1)), f"the cache is not this sequence's: {values}"
        return [int(token) for token in cache.blocks[-1][pages, 0, 0].reshape(-1, 4)[: last + 1, 0]]


def logits_of(tokens: Sequence[int]) -> NDArray[np.float32]:
    following = (sum((token + 1) * (index + 1) for index, token in enumerate(tokens)) * 31 + 7) % VOCAB
    return -((np.arange(VOCAB) - following) % VOCAB).astype(np.float32) * 0.1


def expected(request: GenerationRequest, context: int = 256) -> tuple[tuple[int, ...], FinishReason]:
    """The greedy answer, without any cache."""
    known = list(request.prompt)
    sampling = request.sampling
    while True:
        logits = logits_of(known)
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
        if len(known) - len(request.prompt) < sampling.min_tokens:
            logits[list(stops)] = -np.inf
        known.append(int(logits.argmax()))
        answer = tuple(known[len(request.prompt) :])
        if known[-1] in stops:
            return answer, FinishReason.STOP
        if len(answer) == sampling.max_tokens or len(known) == context:
            return answer, FinishReason.LENGTH


def make_request(name: str, prompt_tokens: int, max_tokens: int = 20, **sampling: object) -> GenerationRequest:
    """Its prompt depends on the name, so that no two requests are alike."""
    random = np.random.default_rng(list(name.encode()))
    prompt = tuple(int(token) for token in random.integers(1, VOCAB, prompt_tokens))
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return GenerationRequest(RequestId(name), prompt, params)


def poisoned_memory(settings: EngineSettings = SETTINGS, config: ModelConfig | None = None) -> KvMemory:
    """Pages whose bytes nobody has written are NaN."""
    memory = KvMemory(page_geometry(config or toy_config(), settings))
    memory.blocks.fill(np.nan)
    return memory


class Gate:
    """Holds the engine's thread inside a step: `reached` says that it is there, `open` lets it go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, batch: RaggedBatch) -> None:
        self.reached.set()
        assert self.open.wait(20)


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "did not come true in time"
        time.sleep(0.002)
