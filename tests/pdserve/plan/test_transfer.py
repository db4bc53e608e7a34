"""`pdserve plan transfer`: the worked cases as JSON, the text, model directories, and refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli import main
from pdserve.errors import ConfigError
from pdserve.plan.command import parse_parallel
from pdserve.plan.shapes import BUILT_IN, CacheShape, cache_shape
from policies.layout import KvLayout
from policies.sharding import ParallelLayout

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def keep_signal_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def plan(capsys: pytest.CaptureFixture[str], text: str) -> str:
    assert main(["plan", "transfer", *text.split()]) == 0
    return capsys.readouterr().out


def plan_json(capsys: pytest.CaptureFixture[str], text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(plan(capsys, f"{text} --json"))
    return document


def refused(capsys: pytest.CaptureFixture[str], text: str) -> str:
    assert main(["plan", "transfer", *text.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err.removeprefix("pdserve: ").strip()


@pytest.mark.parametrize(
    ("arguments", "ranks", "writes", "segment_bytes"),
    [
        ("--model qwen3-coder-480b --prefill tp8 --decode tp8", 8, 3_968, 32 << 10),
        ("--model qwen3-coder-480b --prefill tp8 --decode tp4", 4, 15_872, 16 << 10),
        ("--model qwen3-coder-480b --prefill tp4 --decode tp8", 8, 7_936, 16 << 10),
        ("--model qwen3-coder-480b --prefill tp4 --decode tp8 --layout nhd", 8, 507_904, 256),
        ("--model qwen3-coder-480b --prefill tp16 --decode tp16", 16, 3_968, 32 << 10),
        ("--model qwen3-coder-480b --prefill tp16 --decode tp8", 8, 3_968, 32 << 10),
        ("--model qwen3-coder-480b --prefill tp8 --decode tp8 --present 10", 8, 3_348, 32 << 10),
        ("--model deepseek-r1 --prefill tp8 --decode tp8 --layout hnd", 8, 3_904, 72 << 10),
        ("--model deepseek-r1 --prefill tp8 --decode dp8 --layout hnd", 1, 3_904, 72 << 10),
    ],
)
def test_the_worked_cases(
    capsys: pytest.CaptureFixture[str], arguments: str, ranks: int, writes: int, segment_bytes: int
) -> None:
    document = plan_json(capsys, f"{arguments} --prompt 4097 --page 64")
    assert document["prompt"] == 4_097 and document["model"] in BUILT_IN
    assert [entry["rank"] for entry in document["ranks"]] == list(range(ranks))
    assert {entry["writes_expected"] for entry in document["ranks"]} == {writes}
    assert document["expected_count"] == ranks * writes
    for entry in document["ranks"]:
        assert {source["segment_bytes"] for source in entry["sources"]} == {segment_bytes}
        assert entry["bytes"] == writes * segment_bytes == sum(source["bytes"] for source in entry["sources"])


def test_drafter_and_tail_are_in_the_count_of_the_first_rank(capsys: pytest.CaptureFixture[str]) -> None:
    document = plan_json(
        capsys, "--model deepseek-r1 --prefill tp8 --decode dp8 --prompt 4098 --page 64 --drafter --tail"
    )
    assert document["expected_count"] == document["ranks"][0]["writes_expected"] == 4_030
    assert [source["group"] for source in document["ranks"][0]["sources"]] == ["target", "drafter"]
    assert [group["pages_sent"] for group in document["groups"]] == [65, 64]


@pytest.mark.parametrize("arguments", ["--prompt 1", "--prompt 4097 --present 64", "--prompt 1 --tail"])
def test_where_nothing_is_missing_there_is_no_handoff(capsys: pytest.CaptureFixture[str], arguments: str) -> None:
    base = f"--model qwen3-235b --prefill tp4 --decode tp8 {arguments}"
    document = plan_json(capsys, base)
    assert document["expected_count"] == 0
    assert [entry["sources"] for entry in document["ranks"]] == [[]] * 8
    assert "no handoff: " in plan(capsys, base)


def test_the_seed_draws_the_source_and_the_count_does_not_care(capsys: pytest.CaptureFixture[str]) -> None:
    base = "--model deepseek-r1 --prefill tp8 --decode dp8 --prompt 4097"
    documents = [plan_json(capsys, f"{base} --seed {seed}") for seed in range(20)]
    assert {document["expected_count"] for document in documents} == {3_904}
    assert len({document["ranks"][0]["sources"][0]["rank"] for document in documents}) > 3
    by_rail = [plan_json(capsys, f"{base} --seed {seed} --sources rail") for seed in range(5)]
    assert {document["ranks"][0]["sources"][0]["rank"] for document in by_rail} == {0}


def test_nics_share_each_pair_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    document = plan_json(
        capsys,
        "--model qwen3-coder-480b --prefill tp8 --decode tp8 --prompt 4097 --nics-prefill 3 --nics-decode 2",
    )
    for rank in document["ranks"]:
        (source,) = rank["sources"]
        assert sum(nic["share"] for nic in source["nics"]) == pytest.approx(1)
    assert len(document["nics"]["prefill"]) == 24 and len(document["nics"]["decode"]) == 16
    assert {nic["bytes"] for nic in document["nics"]["decode"]} == {3_968 * (32 << 10) // 2}
    assert sum(nic["bytes"] for nic in document["nics"]["prefill"]) == pytest.approx(document["bytes"], abs=24)


def test_the_text_names_ranks_segments_writes_bytes_and_nics(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "--model qwen3-coder-480b --prefill tp4 --decode tp8 --layout nhd --prompt 4097 --tail")
    assert text.isascii()
    assert "NHD blocks cut by head take 128 writes each; in HND they would take 2" in text
    assert "to decode rank 0: 507,905 writes, the tail's included, 124.0 MiB" in text
    assert "to decode rank 7: 507,904 writes, 124.0 MiB" in text
    (row,) = [line.split() for line in text.splitlines() if line.rstrip().endswith("nic3>nic6")]
    assert row == ["3", "target", "6", "62", "64", "128", "256", "507,904", "130,023,424", "nic3>nic6"]
    assert "expected count 4,063,233, 992.0 MiB in all" in text
    assert "prefill  rank 3: nic3 248.0 MiB" in text


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (
            {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64},
            CacheShape("tiny", 4, 2, 8),
        ),
        ({"num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 16}, CacheShape("tiny", 4, 8, 16)),
        (
            {
                "num_hidden_layers": 3,
                "num_attention_heads": 8,
                "kv_lora_rank": 32,
                "qk_rope_head_dim": 16,
                "num_nextn_predict_layers": 1,
            },
            CacheShape("tiny", 3, None, 48, 1),
        ),
    ],
)
def test_a_model_directory_gives_its_shape(tmp_path: Path, config: dict[str, Any], shape: CacheShape) -> None:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    assert cache_shape(str(directory)) == shape


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "num_hidden_layers must be a whole number, at least 1"),
        ('{"num_hidden_layers": 2, "num_attention_heads": "8"}', "num_attention_heads must be a whole number"),
        ('{"num_hidden_layers": 2, "kv_lora_rank": 8}', "qk_rope_head_dim must be a whole number"),
        (
            '{"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 4}',
            "hidden_size (4) is less than num_attention_heads (8)",
        ),
    ],
)
def test_a_directory_that_does_not_tell_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        cache_shape(str(tmp_path))
    assert message in str(caught.value) and "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "tp", "dp"),
    [("tp8", 8, 1), ("dp8", 1, 8), ("TP2DP4", 2, 4), ("dp4-tp2", 2, 4), ("tp8ep8", 8, 1), ("dp8,ep8", 1, 8)],
)
def test_parallel_layouts_are_read(text: str, tp: int, dp: int) -> None:
    assert parse_parallel("--decode", text, KvLayout.NHD) == ParallelLayout(tp, KvLayout.NHD, dp)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model r2 --prefill tp8 --decode tp8 --prompt 9", "--model: no shape and no directory 'r2'; allowed: qwen3"),
        ("--model qwen3-235b --prefill 8 --decode tp8 --prompt 9", "--prefill: got '8', allowed: tp, dp, ep with"),
        ("--model qwen3-235b --prefill ep8 --decode tp8 --prompt 9", "--prefill: got 'ep8', allowed: tp, dp, ep"),
        ("--model qwen3-235b --prefill tp8 --decode tp0 --prompt 9", "--decode: got 'tp0', allowed: tp, dp, ep"),
        ("--model qwen3-235b --prefill tp8tp4 --decode tp8 --prompt 9", "--prefill: got 'tp8tp4', allowed"),
        ("--model qwen3-235b --prefill tp3 --decode tp4 --prompt 9", "4 KV heads cannot be shared by 3 ranks at pref"),
        ("--model qwen3-235b --prefill tp4 --decode tp4 --prompt 0", "--prompt: got 0, allowed: a whole number, at l"),
        ("--model qwen3-235b --prefill tp4 --decode tp4 --prompt 9 --page 0", "--page: got 0, allowed: a whole number"),
        ("--model qwen3-235b --prefill tp4 --decode tp4 --prompt 9 --nics-decode 0", "--nics-decode: got 0, allowed"),
        (
            "--model qwen3-235b --prefill tp4 --decode tp4 --prompt 9 --present 2",
            "--present: got 2, allowed: at most 1",
        ),
        ("--model qwen3-235b --prefill tp4 --decode tp4 --prompt 9 --drafter", "--drafter: qwen3-235b has no drafter"),
    ],
)
def test_refusals_say_what_is_allowed(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    assert refused(capsys, arguments).startswith(message)


def test_it_runs_as_a_program_without_torch_and_ray() -> None:
    program = (
        "import sys; from pdserve.cli import main;"
        "status = main(['plan', 'transfer', '--model', 'deepseek-r1', '--prefill', 'tp8', '--decode', 'dp8',"
        " '--prompt', '4097', '--json']);"
        "print({'torch', 'ray', 'numba'} & sys.modules.keys(), file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["expected_count"] == 3_904
    assert done.stderr == "set()\n"
