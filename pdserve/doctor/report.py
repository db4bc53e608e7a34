"""Findings, and how they are shown."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

WIDTH = 110
_COLOURS = {"ok": "32", "warn": "33", "fail": "31"}


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    """It works, but slower or less safely than it could."""
    FAIL = "fail"
    """It will not work."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `advice` says what to do; it is never empty unless all is well."""

    name: str
    status: Status
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert self.advice or self.status is Status.OK, f"{self.name}: a fault without advice"


def ok(name: str, found: str) -> Check:
    return Check(name, Status.OK, found)


def warn(name: str, found: str, advice: str) -> Check:
    return Check(name, Status.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Check:
    return Check(name, Status.FAIL, found, advice)


def exit_status(checks: Sequence[Check]) -> int:
    """1 if anything fails, else 0: a warning is no reason to stop."""
    return int(any(check.status is Status.FAIL for check in checks))


def as_json(checks: Sequence[Check]) -> str:
    """`{"checks": [{"name", "status", "found", "advice"}, …]}`."""
    entries = [
        {"name": check.name, "status": str(check.status), "found": check.found, "advice": check.advice}
        for check in checks
    ]
    return json.dumps({"checks": entries}, indent=2)


def render(checks: Sequence[Check], *, colour: bool = False) -> str:
    """One aligned line per check, the advice below it; the last line counts. ASCII only."""
    name_width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        status = f"{check.status:<4}"
        if colour:
            status = f"\033[{_COLOURS[check.status]}m{status}\033[0m"
        lines.append(f"{status}  {check.name:<{name_width}}  {check.found}")
        indent = " " * (6 + name_width + 2)
        for paragraph in check.advice.splitlines():
            hanging = "  " if paragraph.startswith("- ") else ""
            width = max(WIDTH - len(indent), 40)
            wrapped = textwrap.wrap(paragraph, width, break_on_hyphens=False, subsequent_indent=hanging)
            lines += [indent + line for line in wrapped]
    counts = Counter(check.status for check in checks)
    lines.append(f"{counts[Status.OK]} ok, {counts[Status.WARN]} warn, {counts[Status.FAIL]} fail")
    return "\n".join(line.encode("ascii", "replace").decode() for line in lines)
