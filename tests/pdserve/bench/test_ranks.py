"""`pdserve bench ranks`, run small: what it reports belongs together. What a step takes is not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.bench.ranks.cli import main
from pdserve.bench.ranks.random_model import Shape, write_random
from pdserve.models.load import load_model


def test_two_ranks_are_measured_against_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, layers, rounds = tmp_path / "figures.json", 2, 3
    small = ["--layers", str(layers), "--hidden", "256", "--dtype", "fp32", "--context", "40", "--steps", "3"]
    assert main([*small, "--rounds", str(rounds), "--batches", "1", "5", "--json", str(report)]) == 0
    read = json.loads(report.read_text())
    assert [row["batch"] for row in read["steps"]] == [1, 5] and read["configuration"]["dtype"] == "fp32"
    for row in read["steps"]:
        assert row["rounds"] == rounds
        assert row["collectives"] == 2 * layers + 2, "one for the embedding, two a layer, one for the logits"
        assert 0 < row["gloo_ms"] < row["two_ranks_ms"] and 0 < row["gloo_share"] < 1
        assert row["message_encode_us"] + row["message_send_us"] > 0 and row["message_us"] > row["message_encode_us"]
        assert row["two_over_one_min"] <= row["two_over_one"] <= row["two_over_one_max"]
    shown = capsys.readouterr().out
    assert "two ranks ms" in shown and "gloo" in shown


def test_a_model_that_two_ranks_cannot_share_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path / "nothing")]) == 1
    assert str(tmp_path / "nothing") in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--hidden", "300"])
    assert "300 is no multiple of 256" in capsys.readouterr().err


def test_the_random_model_loads(tmp_path: Path) -> None:
    shape = Shape(layers=3, hidden=256, vocab=512)
    config = load_model(write_random(tmp_path / "model", shape, "bf16"), "bf16").config
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.vocab) == (3, 256, 4, 2, 512)
