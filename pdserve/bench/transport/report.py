"""The figures as tables for a terminal, in Markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.bench.transport.records import Figures

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def report(figures: Figures) -> str:
    """All tables that have rows."""
    tables = (
        _bandwidth("paged writes, random order", figures.paged, "page_bytes", figures.shares),
        _bandwidth("single writes", figures.single, "bytes", figures.shares),
        _table("operations", figures.operations, _OPERATIONS),
        _table("4 KiB write and 64 B write back", figures.latency, _LATENCY),
        _table("the caller's part of a paged write", figures.post_cost, _POST_COST),
        _table("CPU time of paged writes", figures.cpu, _CPU),
        _table("doing nothing, and being woken", figures.idle, _IDLE),
    )
    return "\n\n".join(filter(None, tables))


def size_text(length_bytes: int) -> str:
    if length_bytes >= 1 << 20 and not length_bytes % (1 << 20):
        return f"{length_bytes >> 20} MiB"
    return f"{length_bytes >> 10} KiB" if length_bytes >= 1024 else f"{length_bytes} B"


def _text(name: str) -> Callable[[Row], str]:
    return lambda row: str(row[name])


def _number(name: str, digits: int) -> Callable[[Row], str]:
    return lambda row: "–" if row[name] is None else f"{row[name]:,.{digits}f}"


_WHO: tuple[Column, ...] = (("system", _text("system")), ("provider", _text("provider")))
_OPERATIONS: tuple[Column, ...] = (
    *_WHO,
    ("operation", lambda row: "immediate" if not row["bytes"] else f"block of {size_text(row['bytes'])}"),
    ("per second, median", _number("per_s_median", 0)),
    ("min", _number("per_s_min", 0)),
    ("max", _number("per_s_max", 0)),
)
_LATENCY: tuple[Column, ...] = (
    *_WHO,
    ("mode", _text("mode")),
    *((f"{name} µs", _number(f"{name}_us", 1)) for name in ("p50", "p99", "max")),
)
_POST_COST: tuple[Column, ...] = (
    *_WHO,
    ("blocks", _text("blocks")),
    ("µs per block", _number("us_per_block", 4)),
    ("µs in all, median", _number("us", 1)),
    ("max", _number("max_us", 1)),
)
_CPU: tuple[Column, ...] = (
    ("page", lambda row: size_text(row["page_bytes"])),
    *_WHO,
    *((f"{name}, s/GB", _number(f"{name}_s_per_gb", 3)) for name in ("sender", "receiver")),
    ("both", _number("s_per_gb", 3)),
)
_IDLE: tuple[Column, ...] = (
    *_WHO,
    ("state", _text("state")),
    ("share of a core", lambda row: f"{row['core_share']:.2%}"),
    ("woken after, p50 µs", _number("wake_up_p50_us", 0)),
    ("max", _number("wake_up_max_us", 0)),
)


def _bandwidth(title: str, rows: list[Row], size: str, shares: list[Row]) -> str:
    kind = "paged" if size == "page_bytes" else "single"
    columns: tuple[Column, ...] = (
        ("size", lambda row: size_text(row[size])),
        *_WHO,
        ("GB/s, median", _number("gb_per_s_median", 2)),
        ("min", _number("gb_per_s_min", 2)),
        ("max", _number("gb_per_s_max", 2)),
        ("share of", lambda row: _shares_of(row, shares, kind, row[size])),
    )
    ranked = sorted(rows, key=lambda row: (row[size], row["provider"], -row["gb_per_s_median"]))
    return _table(title, ranked, columns)


def _shares_of(row: Row, shares: list[Row], kind: str, length_bytes: int) -> str:
    wanted = (row["system"], row["provider"], kind, length_bytes)
    found = [s for s in shares if (s["system"], s["provider"], s["kind"], s["bytes"]) == wanted]
    return ", ".join(f"{s['of']} {s['share_median']:.2f}" for s in found)


def _table(title: str, rows: list[Row], columns: tuple[Column, ...]) -> str:
    if not rows:
        return ""
    lines = [[name for name, _ in columns], *([show(row) for _, show in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    texts = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    texts.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([f"**{title}**", "", *texts])
