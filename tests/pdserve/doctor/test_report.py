from __future__ import annotations

import json

import pytest

from pdserve.doctor.report import as_json, exit_status, fail, ok, render, warn

CHECKS = [
    ok("kernel", "6.8"),
    warn("memlock", "64 KiB", "first line of advice\n- " + "word " * 40),
    fail("libfabric", "absent – gone", "install it"),
]


@pytest.mark.parametrize(("checks", "status"), [(CHECKS, 1), (CHECKS[:2], 0), ([], 0)])
def test_only_a_failure_makes_the_exit_status_1(checks, status):
    assert exit_status(checks) == status


def test_json_has_the_published_shape():
    document = json.loads(as_json(CHECKS))
    assert document.keys() == {"checks"}
    assert [entry.keys() for entry in document["checks"]] == [{"name", "status", "found", "advice"}] * 3
    assert [entry["status"] for entry in document["checks"]] == ["ok", "warn", "fail"]
    assert document["checks"][0]["advice"] == ""


def test_text_is_aligned_ascii_with_advice_below():
    text = render(CHECKS)
    lines = text.splitlines()
    assert text.isascii() and "\033" not in text
    assert lines[0] == "ok    kernel     6.8"
    assert lines[1] == "warn  memlock    64 KiB"
    assert lines[2] == " " * 17 + "first line of advice"
    assert lines[3].startswith(" " * 17 + "- word") and lines[4].startswith(" " * 19 + "word")
    assert max(map(len, lines)) <= 110
    assert lines[-3:] == ["fail  libfabric  absent ? gone", " " * 17 + "install it", "1 ok, 1 warn, 1 fail"]


def test_colour_touches_the_status_only():
    assert render(CHECKS, colour=True).splitlines()[0] == "\033[32mok  \033[0m  kernel     6.8"


def test_a_fault_needs_advice():
    with pytest.raises(AssertionError, match="memlock"):
        warn("memlock", "64 KiB", "")
