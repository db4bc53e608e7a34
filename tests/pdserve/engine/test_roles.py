"""Prefill and decode engines: hooks, pages and hand-over, with one memory that both see in place of a transfer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from pdserve.attention.batch import RaggedBatch
from pdserve.engine.engine import Engine
from pdserve.engine.hooks import Chunk, PrefillJob
from pdserve.engine.local import Collector
from pdserve.errors import ContextLengthError, PdserveError, RequestError
from pdserve.kv.memory import KvMemory
from pdserve.kv.pool import PagePool
from pdserve.types import FinishReason, GenerationRequest, PageIndex, RequestId, Role
from tests.pdserve.engine.toy import (
    SETTINGS,
    VOCAB,
    Gate,
    ToyModel,
    eventually,
    expected,
    make_request,
    poisoned_memory,
)

PAGE = SETTINGS.page_size
LENGTHS = (1, 2, 7, 8, 9, 10, 16, 17, 32, 33, 34, 65, 150)


class PrefillRecorder:
    """Prefill hooks that write down what happens, and check its order."""

    def __init__(self) -> None:
        self.steps: list[tuple[tuple[Chunk, ...], int]] = []
        self.finished: set[RequestId] = set()
        self.failed: dict[RequestId, Exception] = {}
        self.cancelled: list[RequestId] = []
        self._inside: tuple[Chunk, ...] | None = None

    def step_started(self, chunks: tuple[Chunk, ...], counter_base: int) -> None:
        assert self._inside is None and chunks
        self._inside = chunks
        self.steps.append((chunks, counter_base))

    def step_finished(self, chunks: tuple[Chunk, ...]) -> None:
        assert chunks == self._inside
        self._inside = None
        self.finished |= {chunk.job_id for chunk in chunks if chunk.last}

    def job_failed(self, job_id: RequestId, error: Exception) -> None:
        self._inside = None
        self.failed[job_id] = error

    def job_cancelled(self, job_id: RequestId) -> None:
        assert self._inside is None
        self.cancelled.append(job_id)


def job_of(request: GenerationRequest, pages: tuple[PageIndex, ...]) -> PrefillJob:
    return PrefillJob(request.request_id, request.prompt[:-1], pages)


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


@contextmanager
def prefill_engine(model: ToyModel, memory: KvMemory, pool: PagePool) -> Iterator[tuple[Engine, PrefillRecorder]]:
    hooks = PrefillRecorder()
    with Engine(model, memory, pool, SETTINGS, Role.PREFILL, prefill_hooks=hooks) as engine:
        yield engine, hooks


@contextmanager
def decode_engine(
    memory: KvMemory, pool: PagePool, model: ToyModel | None = None
) -> Iterator[tuple[Engine, Collector]]:
    hooks = Collector()
    settings = SETTINGS.model_copy(update={"kv_cache_tokens": pool.total * PAGE})
    with Engine(model or ToyModel(), memory, pool, settings, Role.DECODE, decode_hooks=hooks) as engine:
        yield engine, hooks


def memory_of(pages: int) -> KvMemory:
    return poisoned_memory(SETTINGS.model_copy(update={"kv_cache_tokens": pages * PAGE}))


def fill(memory: KvMemory, tokens: tuple[int, ...], pages: tuple[PageIndex, ...]) -> None:
    """Stands for a handoff: what ToyModel would have put into the cache."""
    for position, token in enumerate(tokens):
        block = memory.blocks[:, pages[position // PAGE], :, 0, position % PAGE]
        block[:, 0], block[:, 1] = token, position


def test_prefill_then_decode_equals_colocated() -> None:
    requests = [make_request(f"pd-{length}", length, 12) for length in LENGTHS]
    pool = PagePool(SETTINGS.pages)
    with (
        poisoned_memory() as memory,
        prefill_engine(ToyModel(), memory, pool) as (prefill, recorder),
        decode_engine(memory, pool) as (decode, collector),
    ):
        pages = {request.request_id: pool.allocate(pages_for(len(request.prompt) - 1)) for request in requests}
        for request in requests[1:]:
            prefill.prefill(job_of(request, pages[request.request_id]))
        eventually(lambda: len(recorder.finished) == len(requests) - 1)
        assert prefill.load().queued_prefill_tokens == prefill.load().waiting == 0
        for request in requests:
            decode.submit_ready(request, pages[request.request_id])
        for request in requests:
            assert collector.finish(request.request_id).finish is FinishReason.LENGTH
            assert collector.tokens(request.request_id) == expected(request)[0]
        assert pool.counts() == (pool.total, 0, 0)
        assert decode.stats().prefill_tokens == 0, "the decode node computed no prompt"


def test_chunks_are_announced_and_cover_each_job() -> None:
    model, pool = ToyModel(), PagePool(SETTINGS.pages)
    requests = [make_request(f"chunk-{length}", length) for length in LENGTHS[1:]]
    with poisoned_memory() as memory, prefill_engine(model, memory, pool) as (engine, recorder):
        engine.layer_counter[0] = 40
        for request in requests:
            engine.prefill(job_of(request, pool.allocate(pages_for(len(request.prompt) - 1))))
        eventually(lambda: len(recorder.finished) == len(requests))
    bases = [base for _, base in recorder.steps]
    assert bases == [40 + 2 * step for step in range(len(bases))], "each step moves the counter by the model's layers"
    assert all(not decode for decode, _ in model.batches), "a prefill node wants no logits"
    for request in requests:
        mine = [chunk for chunks, _ in recorder.steps for chunk in chunks if chunk.job_id == request.request_id]
        assert [chunk.start for chunk in mine] == [0, *(chunk.end for chunk in mine[:-1])]
        assert all(chunk.end % PAGE == 0 for chunk in mine[:-1]) and mine[-1].end == len(request.prompt) - 1
        assert [chunk.last for chunk in mine] == [False] * (len(mine) - 1) + [True]
    order = list(dict.fromkeys(chunk.job_id for chunks, _ in recorder.steps for chunk in chunks))
    assert order == [request.request_id for request in requests], "first come, first served"
    assert any(len(chunks) > 1 for chunks, _ in recorder.steps), "short jobs share a step"
    assert pool.used_pages == sum(pages_for(len(request.prompt) - 1) for request in requests), "pages stay the owner's"


def test_the_counter_moves_layer_by_layer_within_a_step() -> None:
    gate, pool = Gate(), PagePool(SETTINGS.pages)
    request = make_request("layers", 20)
    with poisoned_memory() as memory, prefill_engine(ToyModel(before_step=gate), memory, pool) as (engine, recorder):
        engine.prefill(job_of(request, pool.allocate(3)))
        assert gate.reached.wait(10)
        assert len(recorder.steps) == 1 and int(engine.layer_counter[0]) == 0, "announced before it ran"
        gate.open.set()
        eventually(lambda: int(engine.layer_counter[0]) == 2)


def test_cancel_job_answers_at_every_stage() -> None:
    gate, pool = Gate(), PagePool(SETTINGS.pages)
    first, second, third = (make_request(f"job-{number}", 60) for number in range(3))
    with poisoned_memory() as memory, prefill_engine(ToyModel(before_step=gate), memory, pool) as (engine, recorder):
        for request in (first, second, third):
            engine.prefill(job_of(request, pool.allocate(pages_for(59))))
        assert gate.reached.wait(10)
        engine.cancel_job(second.request_id)  # waits
        engine.cancel_job(first.request_id)  # its first chunk runs
        engine.cancel_job(RequestId("nobody"))
        assert recorder.cancelled == [], "not before the step is over"
        gate.open.set()
        eventually(lambda: len(recorder.cancelled) == 3)
        eventually(lambda: third.request_id in recorder.finished)
        engine.cancel_job(third.request_id)  # is done
        eventually(lambda: len(recorder.cancelled) == 4)
        assert recorder.cancelled == [second.request_id, first.request_id, "nobody", third.request_id]
        ran = [chunk.job_id for chunks, _ in recorder.steps for chunk in chunks]
        assert ran.count(first.request_id) == 1 and ran.count(second.request_id) <= 1  # they may share the first step
        assert engine.load().queued_prefill_tokens == 0
        engine.prefill(job_of(second, pool.allocate(pages_for(59))))  # may come again
        eventually(lambda: second.request_id in recorder.finished)


def test_a_failed_prefill_step_fails_its_jobs_only() -> None:
    def fail(batch: RaggedBatch) -> None:
        if 0 in batch.tokens:
            raise RuntimeError("broken")

    pool = PagePool(SETTINGS.pages)
    good = make_request("good", 40)
    with poisoned_memory() as memory, prefill_engine(ToyModel(before_step=fail), memory, pool) as (engine, recorder):
        engine.prefill(PrefillJob(RequestId("bad"), (0,) * 40, pool.allocate(5)))
        eventually(lambda: RequestId("bad") in recorder.failed)  # else the two would share the step
        engine.prefill(job_of(good, pool.allocate(5)))
        eventually(lambda: good.request_id in recorder.finished)
        assert list(recorder.failed) == ["bad"] and "broken" in str(recorder.failed[RequestId("bad")])
        assert (engine.load().queued_prefill_tokens, engine.stats().failed_steps) == (0, 1)


def test_close_fails_the_jobs() -> None:
    gate, pool = Gate(), PagePool(SETTINGS.pages)
    with poisoned_memory() as memory, prefill_engine(ToyModel(before_step=gate), memory, pool) as (engine, recorder):
        for number in range(3):
            engine.prefill(job_of(make_request(f"close-{number}", 60), pool.allocate(8)))
        assert gate.reached.wait(10)
        threading.Timer(0.05, gate.open.set).start()
        engine.close()
        assert len(recorder.failed) == 3 and all(isinstance(error, PdserveError) for error in recorder.failed.values())


def test_impossible_jobs_are_refused() -> None:
    pool = PagePool(SETTINGS.pages)
    with poisoned_memory() as memory, prefill_engine(ToyModel(), memory, pool) as (engine, _):
        with pytest.raises(RequestError, match="needs 2 pages, not 1"):
            engine.prefill(PrefillJob(RequestId("pages"), (1,) * 9, (PageIndex(0),)))
        with pytest.raises(RequestError, match="has no tokens"):
            engine.prefill(PrefillJob(RequestId("none"), (), ()))
        with pytest.raises(RequestError, match="300 tokens, the context is 256"):
            engine.prefill(PrefillJob(RequestId("long"), (1,) * 300, ()))
        with pytest.raises(ValueError, match="submit is for the colocated role"):
            engine.submit(make_request("wrong", 3))


def test_decode_refuses_and_leaves_the_pages() -> None:
    pool = PagePool(SETTINGS.pages)
    with poisoned_memory() as memory, decode_engine(memory, pool) as (engine, _):
        pages = pool.allocate(1)
        with pytest.raises(RequestError, match="needs 2 pages for its cache, not 1"):
            engine.submit_ready(make_request("few", 10), pages)
        with pytest.raises(RequestError, match="has ended: 3 tokens"):
            engine.submit_ready(make_request("over", 2, 3), pages, (1, 2, 3))
        with pytest.raises(ContextLengthError):
            engine.submit_ready(make_request("long", 256), pages)
        assert pool.used_pages == 1


def test_preempted_sequences_come_back_with_what_they_had() -> None:
    """More sequences than pages: each preemption is answered by a 'handoff' of prompt + generated."""
    pool, requests = PagePool(16), [make_request(f"back-{number}", 10 + number, 40) for number in range(6)]
    waiting: list[tuple[GenerationRequest, tuple[int, ...]]] = [(request, ()) for request in requests]
    with memory_of(16) as memory, decode_engine(memory, pool) as (engine, collector):
        handed_over = 0

        def pump() -> bool:
            nonlocal handed_over
            waiting.extend(collector.preemptions[handed_over:])
            handed_over = len(collector.preemptions)
            while waiting:
                request, generated = waiting[0]
                cached = (request.prompt + generated)[:-1]
                if pages_for(len(cached)) > pool.free_pages:
                    break
                pages = pool.allocate(pages_for(len(cached)))
                fill(memory, cached, pages)
                engine.submit_ready(request, pages, generated)
                waiting.pop(0)
            return len(collector._last) == len(requests)

        eventually(pump, 30)
        assert collector.preemptions and engine.stats().preemptions == len(collector.preemptions)
        for request in requests:
            assert collector.tokens(request.request_id) == expected(request, 128)[0], "nothing is output twice"
        assert pool.counts() == (16, 0, 0)


def test_a_sequence_waits_for_pages_that_others_hold() -> None:
    """The pool is drawn on by handoffs too; when those pages come back, the engine wakes up by itself."""
    pool, request = PagePool(4), make_request("thirsty", 9, 3)
    with memory_of(4) as memory, decode_engine(memory, pool) as (engine, collector):
        mine, others = pool.allocate(1), pool.allocate(3)
        fill(memory, request.prompt[:-1], mine)
        engine.submit_ready(request, mine)
        time.sleep(0.1)  # it has looked, and sleeps
        assert engine.load().waiting == 1
        assert collector.tokens(request.request_id) == ()
        pool.quarantine(others)
        assert engine.load().quarantined_pages == 3 and collector.tokens(request.request_id) == ()
        pool.release(others)
        assert collector.finish(request.request_id).finish is FinishReason.LENGTH
        assert collector.tokens(request.request_id) == expected(request)[0]
        assert pool.counts() == (4, 0, 0)


def test_generated_tokens_count_against_the_limits() -> None:
    request = make_request("again", 9, 10, temperature=1.0, seed=3, min_tokens=4)
    pool = PagePool(SETTINGS.pages)
    with poisoned_memory() as memory, decode_engine(memory, pool) as (engine, collector):
        pages = pool.allocate(1)
        fill(memory, request.prompt[:-1], pages)
        engine.submit_ready(request, pages)
        collector.finish(request.request_id)
        whole = collector.tokens(request.request_id)
        assert len(whole) == 10 and set(whole) <= set(range(VOCAB))
        collector._last.clear()
        cached = request.prompt + whole[:5]
        pages = pool.allocate(pages_for(len(cached)))
        fill(memory, cached, pages)
        engine.submit_ready(request, pages, whole[:6])
        collector.finish(request.request_id)
        assert collector.tokens(request.request_id) == whole + whole[6:]


def test_cancel_while_decoding_and_while_waiting() -> None:
    pool = PagePool(SETTINGS.pages)
    with poisoned_memory() as memory, decode_engine(memory, pool) as (engine, collector):
        requests = [make_request(f"cancel-{number}", 9, 200) for number in range(SETTINGS.max_batch + 3)]
        for request in requests:
            pages = pool.allocate(1)
            fill(memory, request.prompt[:-1], pages)
            engine.submit_ready(request, pages)
        collector.wait_for_tokens(requests[0].request_id, 2)
        for request in reversed(requests):
            engine.cancel(request.request_id)
        assert all(collector.finish(request.request_id).finish is FinishReason.ABORT for request in requests)
        assert pool.counts() == (pool.total, 0, 0)
        assert not np.isnan(memory.blocks[0]).all()
