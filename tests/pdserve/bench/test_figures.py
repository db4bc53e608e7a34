import json

import pytest

from pdserve.bench.transport.plot import plot
from pdserve.bench.transport.records import Figures
from pdserve.bench.transport.report import report, size_text

WHO = {"system": "engine", "provider": "tcp"}


@pytest.fixture
def figures() -> Figures:
    speed = {"gb_per_s_median": 2.0, "gb_per_s_min": 1.5, "gb_per_s_max": 2.25, "rounds": 3}
    share = {"share_median": 0.97, "share_min": 0.9, "share_max": 1.0}
    return Figures(
        paged=[{**WHO, "page_bytes": size, **speed} for size in (16384, 1 << 20)],
        single=[{**WHO, "bytes": 4 << 20, **speed}],
        operations=[
            {**WHO, "operation": "block", "bytes": 64, "per_s_median": 1.5e6, "per_s_min": 1e6, "per_s_max": 2e6}
        ],
        latency=[{**WHO, "mode": "polled", "p50_us": 17.25, "p99_us": 30.0, "max_us": 90.0}],
        post_cost=[{**WHO, "blocks": 4000, "us_per_block": 0.0123, "us": 49.2, "max_us": 80.0}],
        cpu=[
            {**WHO, "page_bytes": 16384, "sender_s_per_gb": 0.3, "receiver_s_per_gb": 0.4, "s_per_gb": 0.7},
        ],
        idle=[{**WHO, "state": "open", "core_share": 0.0031, "wake_up_p50_us": None, "wake_up_max_us": None}],
        shares=[{**WHO, "kind": "paged", "bytes": 16384, "of": "raw", **share}],
    )  # fmt: skip


def test_the_tables_show_medians_spread_and_share(figures):
    text = report(figures)
    (line,) = [line for line in text.splitlines() if line.startswith("| 16 KiB") and "raw" in line]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "16 KiB", "engine", "tcp", "2.00", "1.50", "2.25", "raw 0.97",
    ]  # fmt: skip
    assert "1,500,000" in text and "block of 64 B" in text and "17.2" in text and "0.0123" in text
    assert "0.31%" in text and "–" in text
    widths = {len(line) for line in text.split("\n\n")[1].splitlines()}
    assert len(widths) == 1


def test_what_was_not_measured_has_no_table(figures):
    assert report(Figures()) == ""
    assert "CPU" not in report(Figures(paged=figures.paged))


def test_the_document_has_its_tables_and_survives_json(figures):
    document = json.loads(json.dumps(figures.document({"rounds": 3})))
    assert list(document) == [
        "configuration", "paged", "single", "operations", "latency", "post_cost", "cpu", "idle", "shares",
    ]  # fmt: skip
    assert document["configuration"] == {"rounds": 3} and document["paged"] == figures.paged


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_plot_is_written_in_the_format_of_its_name(figures, tmp_path, suffix):
    path = tmp_path / f"figure.{suffix}"
    plot(figures, {"processor": "made up", "cores": 2, "window": 128, "rounds": 3}, path)
    begin = path.read_bytes()[:200]
    assert begin.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in path.read_bytes()[:600]


def test_a_plot_of_few_tables_says_what_was_not_measured(figures, tmp_path):
    path = tmp_path / "figure.svg"
    plot(Figures(paged=figures.paged), {}, path)
    assert path.stat().st_size > 0
    with pytest.raises(ValueError, match="not supported"):
        plot(Figures(), {}, tmp_path / "figure.nonsense")


def test_sizes_are_written_as_people_do():
    assert [size_text(n) for n in (64, 1024, 16384, 1 << 20, 64 << 20, 1536 << 10)] == [
        "64 B", "1 KiB", "16 KiB", "1 MiB", "64 MiB", "1536 KiB",
    ]  # fmt: skip
