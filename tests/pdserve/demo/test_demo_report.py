"""The report's arithmetic, on a handoff whose times are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.demo.memory import process_memory, tree_memory
from pdserve.demo.prompts import ANSWER_TOKENS, DemoPrompt, demo_prompts
from pdserve.demo.record import RequestRecord, Streamed
from pdserve.demo.report import print_report
from pdserve.messenger.target import HandoffTrace
from pdserve.messenger.wire import HandoffId, LayerTiming, PrefillTimings
from pdserve.text import Tokenizer
from pdserve.types import Incarnation, NodeId, RequestId
from tests.pdserve.models.tiny import write_byte_tokenizer


def record(tokens: tuple[int, ...] = (1, 2, 3)) -> RequestRecord:
    # Two chunks of two layers; the very last layer's writes complete after the last forward pass has ended at 11.0.
    computed = ((0, 0, 10.1), (0, 1, 10.2), (1, 0, 10.6), (1, 1, 11.0))
    layers = tuple(LayerTiming(chunk, layer, at, at + 0.01, at + 0.05, 4, 1_000) for chunk, layer, at in computed)
    timings = PrefillTimings(9.0, 10.0, 11.0, 11.05, ((0, 64), (64, 128)), layers)
    trace = HandoffTrace(
        request_id=RequestId("r"),
        handoff=HandoffId(Incarnation(1), 1),
        prefill=NodeId("p0"),
        provider="tcp",
        attempt=1,
        prompt_tokens=129,
        requested_at=9.0,
        writes_expected=16,
        bytes_expected=4_000,
        writes_counted=16,
        ready_at=11.06,
        writes_posted=16,
        timings=timings,
    )
    streamed = Streamed("r", "abc", list(tokens), [2.1, 2.2, 2.4])
    return RequestRecord(DemoPrompt("mine", tuple(range(129))), streamed, trace, (1, 2, 3))


def test_what_is_derived_from_a_trace() -> None:
    row = record().as_json()
    assert row["bytes"] == 4_000
    assert row["bytes_completed_before_prefill_end"] == 3_000
    assert row["exposed_transfer_s"] == pytest.approx(0.06)
    assert row["prefill_queue_s"] == pytest.approx(1.0)
    assert row["layer_compute_s"] == pytest.approx(0.25)  # of 0.1 and 0.4; not across chunks
    assert (row["ttft_s"], row["itl_s"]) == (2.1, pytest.approx(0.15))
    assert (row["writes_expected"], row["writes_counted"], row["equal_to_colocated"]) == (16, 16, True)
    assert not record(tokens=(1, 2, 4)).equal


def test_the_table_names_every_request(capsys: pytest.CaptureFixture[str]) -> None:
    print_report([record()])
    out = capsys.readouterr().out
    assert "mine" in out and "75.0%" in out and "yes" in out
    assert out.count("\n") > 6


def test_prompts_fit_the_context(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    prompts = {prompt.name: prompt for prompt in demo_prompts(tokenizer, 512)}
    assert set(prompts) == {"short", "unicode", "code", "1k", "4k"}
    assert all(len(prompt.tokens) + ANSWER_TOKENS <= 512 for prompt in prompts.values())
    long = {prompt.name: len(prompt.tokens) for prompt in demo_prompts(tokenizer, 8_192)}
    assert 900 < long["1k"] < 1_150 and 3_800 < long["4k"] < 4_150


def test_memory_is_read_from_the_kernel() -> None:
    import os

    mine = process_memory(os.getpid())
    assert mine is not None and 0 < mine.beside_pool <= mine.total <= tree_memory() * 1.5
    assert process_memory(2**22 + 1) is None
