"""What goes wrong inside an engine stays where it went wrong, and closing ends everything."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pdserve.attention.batch import RaggedBatch
from pdserve.engine.engine import Engine
from pdserve.engine.local import Collector
from pdserve.errors import PdserveError
from pdserve.kv.pool import PagePool
from pdserve.types import FinishReason, GenerationRequest, RequestId, Role, SamplingParams
from tests.pdserve.engine.toy import (
    SETTINGS,
    Gate,
    ToyModel,
    expected,
    make_request,
    poisoned_memory,
)
from tests.pdserve.engine.toy_engine import colocated, generate


def test_a_failed_step_ends_its_requests_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    def fail(batch: RaggedBatch) -> None:
        if batch.rows > 1 and 13 in batch.tokens:
            raise RuntimeError("the kernel is broken")

    bad = GenerationRequest(RequestId("bad"), (13,) * 20, SamplingParams(max_tokens=4, temperature=0))
    with colocated(ToyModel(before_step=fail)) as (engine, collector):
        for _ in range(2):
            engine.submit(bad)
            last = collector.finish(bad.request_id)
            assert last.finish is FinishReason.ERROR and "RuntimeError: the kernel is broken" in (last.error or "")
            collector._last.clear()
        assert engine.stats().failed_steps == 2
        assert "1 in a row" in caplog.text and "2 in a row" in caplog.text
        good = GenerationRequest(
            RequestId("good"), (5, 6), SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        )
        assert generate(engine, [good])[good.request_id] == expected(good)[0]


def test_broken_logits_are_an_error_not_garbage() -> None:
    class Broken(ToyModel):
        def forward(self, batch, cache, layer_counter):  # type: ignore[no-untyped-def]
            logits = super().forward(batch, cache, layer_counter)
            logits[batch.tokens[batch.logit_rows] == 55] = np.nan
            return logits

    healthy = GenerationRequest(RequestId("healthy"), (5, 6), SamplingParams(max_tokens=1, temperature=0))
    broken = GenerationRequest(RequestId("broken"), (5, 55), SamplingParams(max_tokens=9, temperature=0))
    with colocated(Broken()) as (engine, collector):
        engine.submit(healthy)
        engine.submit(broken)
        last = collector.finish(broken.request_id)
        assert (last.finish, last.tokens) == (FinishReason.ERROR, ())
        assert last.error == "the model's logits at position 1 are not finite"
        assert collector.finish(healthy.request_id).finish is not FinishReason.ERROR


def test_a_hook_that_raises_does_not_stop_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    class Clumsy(Collector):
        def step_outputs(self, outputs):  # type: ignore[no-untyped-def]
            super().step_outputs(outputs)
            raise KeyError("clumsy")

    with poisoned_memory() as memory:
        pool = PagePool(SETTINGS.pages)
        with Engine(ToyModel(), memory, pool, SETTINGS, Role.COLOCATED, decode_hooks=Clumsy()) as engine:
            request = make_request("clumsy", 10)
            assert generate(engine, [request])[request.request_id] == expected(request)[0]
    assert "an engine hook raised" in caplog.text


def test_close_ends_everything() -> None:
    gate, collector = Gate(), Collector()
    with poisoned_memory() as memory:
        pool = PagePool(SETTINGS.pages)
        engine = Engine(ToyModel(before_step=gate), memory, pool, SETTINGS, Role.COLOCATED, decode_hooks=collector)
        engine.start()
        requests = [make_request(f"close-{number}", 30) for number in range(12)]
        for request in requests:
            engine.submit(request)
        assert gate.reached.wait(10)
        threading.Timer(0.05, gate.open.set).start()
        engine.close()
        engine.close()
        assert all(collector.finish(request.request_id).finish is FinishReason.ABORT for request in requests)
        assert pool.counts() == (pool.total, 0, 0)
        with pytest.raises(PdserveError, match="closed"):
            engine.submit(make_request("late", 3))


def test_an_engine_that_never_started_closes_too() -> None:
    collector = Collector()
    with poisoned_memory() as memory:
        engine = Engine(ToyModel(), memory, PagePool(SETTINGS.pages), SETTINGS, Role.COLOCATED, decode_hooks=collector)
        engine.submit(make_request("early", 3))
        engine.close()
    assert collector.finish(RequestId("early")).finish is FinishReason.ABORT
