"""`pdserve demo` as a user runs it, on a tiny model: it ends by itself, says yes, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.pdserve.models.tiny import make_tiny_llama

KEYS = {
    "prompt_tokens",
    "writes_expected",
    "writes_counted",
    "bytes",
    "bytes_completed_before_prefill_end",
    "exposed_transfer_s",
    "ttft_s",
    "itl_s",
    "equal_to_colocated",
}


def processes_marked(mark: str) -> list[int]:
    """Processes that inherited `mark` in their environment, whatever session they are in."""
    alive = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes():
                    alive.append(int(entry.name))
    return alive


@pytest.mark.slow
def test_the_demo_ends_with_equal_answers_and_no_process(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "tiny", layers=3, context=2048)
    report = tmp_path / "demo.json"
    command = [sys.executable, "-m", "pdserve", "demo", "--json", str(report), "--set", f"model.path={model}"]
    mark = f"mark-{uuid.uuid4().hex}"
    demo = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=400, env={**os.environ, "PDSERVE_MARK": mark}
    )
    assert demo.returncode == 0, demo.stdout
    assert "all answers equal the colocated engine" in demo.stdout
    assert processes_marked(mark) == []
    requests = json.loads(report.read_text())["requests"]
    assert len(requests) == 5
    for row in requests:
        assert row.keys() >= KEYS
        assert row["equal_to_colocated"] and row["writes_counted"] == row["writes_expected"] > 0
