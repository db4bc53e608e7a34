"""The figures: what `--json` writes, row by row, and how they are computed from the rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from pdserve.bench.transport.contest import Series, is_ours


@dataclass(slots=True)
class Figures:
    """One list of rows per table; a row is a plain dict, as `--json` has it."""

    paged: list[dict[str, Any]] = field(default_factory=list)
    single: list[dict[str, Any]] = field(default_factory=list)
    operations: list[dict[str, Any]] = field(default_factory=list)
    latency: list[dict[str, Any]] = field(default_factory=list)
    post_cost: list[dict[str, Any]] = field(default_factory=list)
    cpu: list[dict[str, Any]] = field(default_factory=list)
    idle: list[dict[str, Any]] = field(default_factory=list)
    shares: list[dict[str, Any]] = field(default_factory=list)

    def document(self, configuration: dict[str, Any]) -> dict[str, Any]:
        return {"configuration": configuration, **asdict(self)}


SIZE_NAMES = {"paged": "page_bytes", "single": "bytes"}


def bandwidth_rows(every: Iterable[Series]) -> list[dict[str, Any]]:
    return [
        {
            "system": s.system,
            "provider": s.provider,
            SIZE_NAMES[s.load.kind]: s.load.block_bytes,
            **_spread("gb_per_s", s.gb_per_s),
            "rounds": len(s.rounds),
        }
        for s in every
    ]


def operation_rows(every: Iterable[Series]) -> list[dict[str, Any]]:
    return [
        {
            "system": s.system,
            "provider": s.provider,
            "operation": "immediate" if s.load.kind == "immediate" else "block",
            "bytes": s.load.block_bytes,
            **_spread("per_s", s.per_s),
            "rounds": len(s.rounds),
        }
        for s in every
    ]


def cpu_rows(every: Iterable[Series]) -> list[dict[str, Any]]:
    """CPU seconds of both processes for each GB moved by paged writes."""
    return [
        {
            "system": s.system,
            "provider": s.provider,
            "page_bytes": s.load.block_bytes,
            "sender_s_per_gb": cpu[0],
            "receiver_s_per_gb": cpu[1],
            "s_per_gb": sum(cpu),
        }
        for s in every
        if (cpu := s.cpu_s_per_gb) is not None
    ]


def share_rows(every: Sequence[Series]) -> list[dict[str, Any]]:
    """Each of ours (but the bare loops) over each reference on the same provider, round by round."""
    rows = []
    for mine in every:
        if not is_ours(mine.system) or mine.system == "raw":
            continue
        for other in every:
            reference = other.system == "raw" or not is_ours(other.system)
            if reference and (other.provider, other.load) == (mine.provider, mine.load):
                rows.append(_share(mine, other))
    return rows


def latency_row(system: str, provider: str, mode: str, trips_us: Sequence[float]) -> dict[str, Any]:
    p50, p99 = np.percentile(trips_us, (50, 99)).tolist()
    return {
        "system": system,
        "provider": provider,
        "mode": mode,
        "p50_us": p50,
        "p99_us": p99,
        "max_us": max(trips_us),
    }


def post_cost_row(system: str, provider: str, blocks: int, seconds: Sequence[float]) -> dict[str, Any]:
    middle = statistics.median(seconds)
    return {
        "system": system,
        "provider": provider,
        "blocks": blocks,
        "us_per_block": middle / blocks * 1e6,
        "us": middle * 1e6,
        "max_us": max(seconds) * 1e6,
    }


def idle_row(system: str, provider: str, state: str, core_share: float, wake_ups_us: Sequence[float]) -> dict[str, Any]:
    """`core_share` of the side that took more of a core. Without wake-ups (of another host) their figures are None."""
    return {
        "system": system,
        "provider": provider,
        "state": state,
        "core_share": core_share,
        "wake_up_p50_us": statistics.median(wake_ups_us) if wake_ups_us else None,
        "wake_up_max_us": max(wake_ups_us, default=None),
    }


def _share(mine: Series, other: Series) -> dict[str, Any]:
    ratios = [b.seconds / a.seconds for a, b in zip(mine.rounds, other.rounds, strict=False)]
    return {
        "system": mine.system,
        "provider": mine.provider,
        "kind": mine.load.kind,
        "bytes": mine.load.block_bytes,
        "of": other.system,
        **_spread("share", ratios),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_median": statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
