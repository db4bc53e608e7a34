"""The figures as one picture: bandwidth by size, round trips, CPU time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdserve.bench.transport.records import Figures
from pdserve.bench.transport.report import size_text

Row = dict[str, Any]
_STYLES = {"tcp": "-", "shm": "--", "ucx": "-."}
"""The line of a provider; dotted for others."""


def plot(figures: Figures, configuration: dict[str, Any], path: Path) -> None:
    """Writes the picture in the format that the name ends in. Raises ValueError for one that there is not."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    colours = _colours(figures)
    figure, axes = plt.subplots(2, 2, figsize=(13, 9), layout="constrained")
    _bandwidth(axes[0][0], "paged writes, random order", figures.paged, "page_bytes", colours)
    _bandwidth(axes[0][1], "single writes", figures.single, "bytes", colours)
    _latency(axes[1][0], figures.latency)
    _cpu(axes[1][1], figures.cpu, colours)
    figure.suptitle(
        f"Two processes, {configuration.get('processor') or 'unknown processor'}, {configuration.get('cores')} cores; "
        f"window {configuration.get('window')}, {configuration.get('rounds')} interleaved rounds, medians and min–max"
    )
    try:
        figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)


def _colours(figures: Figures) -> dict[str, str]:
    rows = [*figures.paged, *figures.single, *figures.cpu]
    return {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(row["system"] for row in rows))}


def _lines(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row["system"], row["provider"]), []).append(row)
    return lines


def _bandwidth(axes: Any, title: str, rows: list[Row], size: str, colours: dict[str, str]) -> None:
    for (system, provider), line in _lines(rows).items():
        middle = [row["gb_per_s_median"] for row in line]
        below = [row["gb_per_s_median"] - row["gb_per_s_min"] for row in line]
        above = [row["gb_per_s_max"] - row["gb_per_s_median"] for row in line]
        axes.errorbar(
            [row[size] for row in line], middle, yerr=(below, above), label=f"{system}, {provider}", capsize=2,
            marker="o", markersize=4, color=colours[system], linestyle=_STYLES.get(provider, ":"),
        )  # fmt: skip
    _finish(axes, title, "GB/s", rows)
    _sizes(axes, rows, size)


def _cpu(axes: Any, rows: list[Row], colours: dict[str, str]) -> None:
    for (system, provider), line in _lines(rows).items():
        axes.plot(
            [row["page_bytes"] for row in line], [row["s_per_gb"] for row in line], marker="o", markersize=4,
            label=f"{system}, {provider}", color=colours[system], linestyle=_STYLES.get(provider, ":"),
        )  # fmt: skip
    _finish(axes, "CPU time of paged writes, both processes", "s per GB", rows)
    _sizes(axes, rows, "page_bytes")


def _latency(axes: Any, rows: list[Row]) -> None:
    """A point at the median, a line to p99, a thin one to the longest."""
    places = range(len(rows))
    p50, p99, longest = ([row[name] for row in rows] for name in ("p50_us", "p99_us", "max_us"))
    axes.hlines(places, p50, longest, color="lightgrey", label="max")
    axes.hlines(places, p50, p99, color="C0", linewidth=4, alpha=0.5, label="p99")
    axes.plot(p50, places, "o", color="C0", label="p50")
    for place, value in zip(places, p50, strict=True):
        axes.annotate(
            f"{value:.0f}", (value, place), xytext=(0, 5), textcoords="offset points", fontsize=8, ha="center"
        )
    axes.set_yticks(places, [f"{row['system']}, {row['provider']}, {row['mode']}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    _finish(axes, "4 KiB write and 64 B write back", "", rows)
    axes.set_xlabel("µs")
    if rows:
        axes.set_xscale("log")


def _finish(axes: Any, title: str, unit: str, rows: list[Row]) -> None:
    axes.set_title(title if rows else f"{title}: not measured")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    if rows:
        axes.legend(fontsize=7)


def _sizes(axes: Any, rows: list[Row], size: str) -> None:
    sizes = sorted({row[size] for row in rows})
    if sizes:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [size_text(value) for value in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
