"""The engine on a model that answers from its pages: right tokens, right endings, and every page back."""

from __future__ import annotations

import itertools
import random
import threading
from dataclasses import replace

import pytest

from pdserve.attention.batch import RaggedBatch
from pdserve.config import EngineSettings
from pdserve.engine.engine import Engine
from pdserve.engine.local import Collector
from pdserve.errors import ConfigError, ContextLengthError, RequestError
from pdserve.kv.pool import PagePool
from pdserve.types import FinishReason, GenerationRequest, RequestId, Role, SamplingParams
from tests.pdserve.engine.toy import (
    EOS,
    SETTINGS,
    VOCAB,
    Gate,
    ToyModel,
    eventually,
    expected,
    make_request,
    poisoned_memory,
)
from tests.pdserve.engine.toy_engine import colocated, generate

LENGTHS = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 34, 63, 64, 65, 100, 150)


def test_each_length_alone() -> None:
    with colocated() as (engine, _):
        for length in LENGTHS:
            request = make_request(f"alone-{length}", length)
            assert generate(engine, [request])[request.request_id] == expected(request)[0]


def test_all_lengths_together() -> None:
    requests = [make_request(f"mix-{length}", length, 5 + length % 13) for length in LENGTHS]
    model = ToyModel()
    with colocated(model) as (engine, _):
        answers = generate(engine, requests)
    assert answers == {request.request_id: expected(request)[0] for request in requests}
    assert any(decode and chunks for decode, chunks in model.batches), "decode rows and chunks ran in one pass"
    assert max(chunks for _, chunks in model.batches) <= SETTINGS.chunk_tokens


def test_preemption_changes_no_token() -> None:
    requests = [make_request(f"tight-{number}", 20 + number, 40) for number in range(8)]
    with colocated(kv_cache_tokens=128) as (engine, collector):
        answers = generate(engine, requests)
        assert engine.stats().preemptions > 0 and not collector.preemptions
    assert answers == {request.request_id: expected(request, 128)[0] for request in requests}


def test_preemption_changes_no_seeded_sample() -> None:
    requests = [make_request(f"seeded-{number}", 20 + number, 40, temperature=1.0, seed=number) for number in range(6)]
    with colocated() as (engine, _):
        roomy = generate(engine, requests)
        assert engine.stats().preemptions == 0
    with colocated(kv_cache_tokens=128) as (engine, _):
        tight = generate(engine, requests)
        assert engine.stats().preemptions > 0
    with colocated(max_batch=1) as (engine, _):
        alone = generate(engine, requests)
    assert roomy == tight == alone
    assert all(answer != expected(request)[0] for answer, request in zip(roomy.values(), requests, strict=True))


def test_a_preempted_sequence_is_the_first_to_return() -> None:
    """Two grow until the pages do for one; the one that gave way comes before a third that has waited all along."""
    first, second = (make_request(f"turn-{name}", 30, 60) for name in ("first", "second"))
    third = make_request("turn-third", 30, 3)
    ends: list[RequestId] = []

    class Order(Collector):
        def step_outputs(self, outputs):  # type: ignore[no-untyped-def]
            ends.extend(output.request_id for output in outputs if output.finish)
            super().step_outputs(outputs)

    settings = SETTINGS.model_copy(update={"kv_cache_tokens": 128, "max_batch": 2})
    order = Order()
    with poisoned_memory(settings) as memory:
        pool = PagePool(settings.pages)
        engine = Engine(ToyModel(), memory, pool, settings, Role.COLOCATED, decode_hooks=order)
        for request in (first, second, third):
            engine.submit(request)
        with engine:
            for request in (first, second, third):
                order.finish(request.request_id, 30)
                assert order.tokens(request.request_id) == expected(request, 128)[0]
        assert engine.stats().preemptions
    assert ends[0] == first.request_id, "the third did not slip in where the second had to leave"


def test_endings() -> None:
    plain = make_request("plain", 12, 30)
    answer, _ = expected(plain)
    stop = answer[4]
    cases = {
        "length": (plain, FinishReason.LENGTH),
        "one": (_with(plain, "one", max_tokens=1), FinishReason.LENGTH),
        "stop id": (_with(plain, "stop id", stop_token_ids=(stop,)), FinishReason.STOP),
        "first": (_with(plain, "first", stop_token_ids=(answer[0],)), FinishReason.STOP),
        "min": (_with(plain, "min", stop_token_ids=(answer[0],), min_tokens=3), None),
        "context": (make_request("context", 250, 100), FinishReason.LENGTH),
        "eos": (_with(plain, "eos", ignore_eos=False, max_tokens=200), None),
    }
    with colocated(max_model_len=256) as (engine, collector):
        answers = generate(engine, [request for request, _ in cases.values()])
        for request, reason in cases.values():
            tokens, finish = expected(request)
            assert answers[request.request_id] == tokens
            assert collector.finish(request.request_id).finish is finish
            assert reason in (finish, None)
    assert len(answers[RequestId("context")]) == 6 and answers[RequestId("stop id")][-1] == stop
    assert len(answers[RequestId("first")]) == len(answers[RequestId("one")]) == 1
    assert len(answers[RequestId("min")]) >= 3


def _with(request: GenerationRequest, name: str, **sampling: object) -> GenerationRequest:
    return replace(request, request_id=RequestId(name), sampling=replace(request.sampling, **sampling))  # type: ignore[arg-type]


def test_a_first_token_that_ends_starts_no_other_step() -> None:
    model = ToyModel()
    with colocated(model) as (engine, _):
        generate(engine, [make_request("single", 9, 1)])
    assert model.batches == [(0, 8), (1, 0)]


def test_what_can_never_run_is_refused_with_numbers() -> None:
    with colocated(kv_cache_tokens=64, max_model_len=128) as (engine, _):
        with pytest.raises(ContextLengthError, match=r"128 tokens; with at least one .* context of 128 tokens"):
            engine.submit(make_request("long", 128))
        with pytest.raises(RequestError, match=r"100 tokens; this node's page pool holds 64"):
            engine.submit(make_request("big", 100))
        with pytest.raises(RequestError, match="max_tokens must be at least 1, not 0"):
            engine.submit(make_request("none", 5, 0))
        with pytest.raises(RequestError, match="no tokens"):
            engine.submit(make_request("empty", 0))
        with pytest.raises(RequestError, match=f"token id {VOCAB} is outside"):
            engine.submit(GenerationRequest(RequestId("odd"), (VOCAB,), SamplingParams()))
        longest = make_request("longest", 63, 10)
        assert generate(engine, [longest])[longest.request_id] == expected(longest, 64)[0]
        with pytest.raises(ValueError, match="submit_ready is for the decode role"):
            engine.submit_ready(make_request("ready", 1), ())
    with pytest.raises(ConfigError, match=r"max_model_len \(300\)"):
        Engine(
            ToyModel(),
            poisoned_memory(),
            PagePool(64),
            SETTINGS.model_copy(update={"max_model_len": 300}),
            Role.COLOCATED,
            decode_hooks=Collector(),
        )


def test_a_request_id_is_used_once_at_a_time() -> None:
    gate = Gate()
    with colocated(ToyModel(before_step=gate)) as (engine, collector):
        request = make_request("twin", 5)
        engine.submit(request)
        with pytest.raises(RequestError, match="twin is already in the engine"):
            engine.submit(request)
        gate.open.set()
        collector.finish(request.request_id)
        engine.submit(request)
        eventually(lambda: len(collector.tokens(request.request_id)) == 40)


@pytest.mark.parametrize("steps", range(12))
def test_cancel_at_every_stage(steps: int) -> None:
    """In the queue, between chunks, while decoding, and when all is over: the pages come back, the others go on."""
    counter, submitted = itertools.count(), threading.Event()
    victim, other = make_request("victim", 100, 5), make_request("other", 40, 30)
    engines: list[Engine] = []

    def cancel(batch: RaggedBatch) -> None:
        assert submitted.wait(10)
        if next(counter) == steps:
            engines[0].cancel(victim.request_id)

    with colocated(ToyModel(before_step=cancel)) as (engine, collector):
        engines.append(engine)
        engine.submit(other)
        engine.submit(victim)
        submitted.set()
        assert collector.finish(other.request_id).finish is FinishReason.LENGTH
        # step 0: the other's first chunk; 1 to 4: the victim's chunks; 5 to 9: its tokens
        finish = FinishReason.ABORT if steps < 9 else FinishReason.LENGTH
        assert collector.finish(victim.request_id).finish is finish
        assert collector.tokens(victim.request_id) == expected(victim)[0][: max(0, min(steps - 4, 5))]
        assert collector.tokens(other.request_id) == expected(other)[0]


def test_cancel_in_the_queue_and_of_nobody() -> None:
    gate = Gate()
    with colocated(ToyModel(before_step=gate), max_batch=1) as (engine, collector):
        first, second = make_request("first", 5), make_request("second", 5)
        engine.submit(first)
        engine.submit(second)
        assert gate.reached.wait(10)
        load = engine.load()
        assert (load.running, load.waiting) == (0, 2)  # the step's outcome is not known yet
        engine.cancel(second.request_id)
        engine.cancel(RequestId("nobody"))
        gate.open.set()
        assert collector.finish(second.request_id).finish is FinishReason.ABORT
        assert collector.finish(first.request_id).finish is FinishReason.LENGTH
        assert collector.tokens(second.request_id) == ()


def test_load_knows_what_was_just_submitted() -> None:
    gate = Gate()
    with colocated(ToyModel(before_step=gate)) as (engine, _):
        for number in range(3):
            engine.submit(make_request(f"load-{number}", 41))
        load = engine.load()
        assert (load.running + load.waiting, load.queued_prefill_tokens, load.total_pages) == (3, 120, 64)
        gate.open.set()


def test_outputs_come_a_step_at_a_time() -> None:
    class Steps(Collector):
        def __init__(self) -> None:
            super().__init__()
            self.sizes: list[int] = []

        def step_outputs(self, outputs):  # type: ignore[no-untyped-def]
            self.sizes.append(len(outputs))
            super().step_outputs(outputs)

    steps = Steps()
    with poisoned_memory() as memory:
        engine = Engine(ToyModel(), memory, PagePool(SETTINGS.pages), SETTINGS, Role.COLOCATED, decode_hooks=steps)
        requests = [make_request(f"step-{number}", 2, 10) for number in range(4)]
        for request in requests:
            engine.submit(request)  # before the start, so that all join in one step
        with engine:
            for request in requests:
                steps.finish(request.request_id)
    assert steps.sizes == [4] * 10


@pytest.mark.parametrize("seed", range(4))
def test_any_load_with_cancels_from_many_threads(seed: int) -> None:
    chance = random.Random(seed)
    requests = [
        make_request(f"storm-{seed}-{number}", chance.randint(1, 90), chance.randint(1, 40)) for number in range(40)
    ]
    cancelled = {request.request_id for request in requests if chance.random() < 0.3}
    pool_tokens = chance.choice((144, 256, 512))
    with colocated(kv_cache_tokens=pool_tokens) as (engine, collector):

        def client(mine: list[GenerationRequest]) -> None:
            for request in mine:
                engine.submit(request)
                if request.request_id in cancelled:
                    collector.wait_for_tokens(request.request_id, chance.randint(0, 5))
                    engine.cancel(request.request_id)

        clients = [threading.Thread(target=client, args=(requests[start::4],)) for start in range(4)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(60)
        for request in requests:
            last = collector.finish(request.request_id)
            answer, finish = expected(request, min(256, pool_tokens))
            got = collector.tokens(request.request_id)
            if last.finish is FinishReason.ABORT:
                assert request.request_id in cancelled and got == answer[: len(got)]
            else:
                assert (got, last.finish) == (answer, finish)


def test_statistics_add_up() -> None:
    with colocated() as (engine, _):
        generate(engine, [make_request("one", 41, 10), make_request("two", 1, 3)])
        stats = engine.stats()
    assert (stats.prefill_tokens, stats.decode_tokens, stats.failed_steps) == (40, 13, 0)
    assert sum(stats.step_buckets) == stats.steps and 0 < stats.model_s < stats.step_s


def test_settings_memory_and_pool_must_agree() -> None:
    with poisoned_memory() as memory, pytest.raises(ValueError, match="disagree"):
        Engine(ToyModel(), memory, PagePool(3), SETTINGS, Role.COLOCATED, decode_hooks=Collector())
    with poisoned_memory() as memory, pytest.raises(ValueError, match="needs decode_hooks"):
        Engine(ToyModel(), memory, PagePool(SETTINGS.pages), SETTINGS, Role.DECODE)


def test_eos_is_the_last_token() -> None:
    settings = EngineSettings.model_validate({**SETTINGS.model_dump(), "kv_cache_tokens": 1024})
    assert settings.pages == 128
    found = None
    for number in range(60):
        request = make_request(f"eos-{number}", 5, 200, ignore_eos=False)
        answer, finish = expected(request)
        if finish is FinishReason.STOP and len(answer) > 1:
            found = request
            break
    assert found is not None
    with colocated() as (engine, _):
        assert generate(engine, [found])[found.request_id][-1] == EOS
