"""A transfer plan as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from pdserve.plan.shapes import CacheShape
from policies.layout import HeadRange, KvLayout
from policies.nics import NicAssignment, NicShare, RankNics
from policies.plan import RankWrites, TransferPlan
from policies.sharding import ParallelLayout

if TYPE_CHECKING:
    from pdserve.plan.command import TransferOptions

GROUP_NAMES = ("target", "drafter")
_HEADER = ("from", "group", "heads", "layers", "pages", "segments", "bytes each", "writes", "bytes", "NICs")


@dataclass(frozen=True, slots=True)
class Planned:
    """`nics`: of the ranks of the prefill replica, and of the decode replica."""

    options: TransferOptions
    shape: CacheShape
    plan: TransferPlan
    nics: tuple[tuple[RankNics, ...], tuple[RankNics, ...]]
    assignment: NicAssignment


# ---------------------------------------------------------------------------- JSON


def as_json(planned: Planned) -> str:
    """One entry of `ranks` per destination rank of the replica that the request lives in; bytes without the tail."""
    options, plan = planned.options, planned.plan
    document = {
        "model": planned.shape.name,
        "prompt": options.prompt,
        "page_size": options.page,
        "dtype": options.dtype,
        "layout": str(plan.request.decode.layout),
        "prefill": _side_json(plan.request.prefill),
        "decode": _side_json(plan.request.decode),
        "pages_present": options.present,
        "tail": plan.request.tail,
        "sources": {"policy": options.sources, "seed": options.seed},
        "groups": [_group_json(plan, number) for number in range(len(plan.request.groups))],
        "ranks": [_rank_json(planned, rank) for rank in range(plan.request.decode.tp)],
        "expected_count": plan.expected_count,
        "bytes": sum(entry.bytes for entry in plan.entries),
        "nics": {
            "prefill": _loads_json(planned.assignment.prefill_load),
            "decode": _loads_json(planned.assignment.decode_load),
        },
    }
    return json.dumps(document, indent=2)


def _side_json(side: ParallelLayout) -> dict[str, int]:
    return {"tp": side.tp, "dp": side.dp}


def _group_json(plan: TransferPlan, number: int) -> dict[str, Any]:
    part = plan.request.groups[number]
    return {
        "name": GROUP_NAMES[number],
        "layers": part.group.layers,
        "kv_heads": part.group.kv_heads,
        "head_dim": part.head_dim,
        "pages_sent": part.pages,
    }


def _rank_json(planned: Planned, rank: int) -> dict[str, Any]:
    plan = planned.plan
    return {
        "rank": rank,
        "writes_expected": plan.writes_to(rank),
        "bytes": plan.bytes_to(rank),
        "sources": [
            _entry_json(entry, paths)
            for entry, paths in zip(plan.entries, planned.assignment.paths, strict=True)
            if entry.destination == rank
        ],
    }


def _entry_json(entry: RankWrites, paths: Iterable[NicShare]) -> dict[str, Any]:
    return {
        "rank": entry.source,
        "group": GROUP_NAMES[entry.group],
        "heads": None if entry.heads is None else list(range(entry.heads.first, entry.heads.stop)),
        "layers": entry.layers,
        "pages": entry.pages,
        "segments_per_block": entry.segments_per_block,
        "segment_bytes": entry.segment_bytes,
        "writes": entry.writes,
        "bytes": entry.bytes,
        "nics": [
            {"source": path.source.name, "destination": path.destination.name, "share": float(path.share)}
            for path in paths
        ],
    }


def _loads_json(loads: Mapping[tuple[int, int], Fraction]) -> list[dict[str, Any]]:
    return [{"rank": rank, "rail": rail, "bytes": round(load)} for (rank, rail), load in loads.items()]


# ---------------------------------------------------------------------------- text


def render(planned: Planned) -> str:
    """The setting, a table per destination rank, and what every NIC carries. ASCII only."""
    plan = planned.plan
    lines = _setting(planned)
    if not plan.entries:
        return "\n".join([*lines, "", f"no handoff: {_why_none(planned)}; expected count 0"])
    rows = [_row(entry, paths) for entry, paths in zip(plan.entries, planned.assignment.paths, strict=True)]
    widths = [max(map(len, column)) for column in zip(_HEADER, *rows, strict=True)]
    for rank in range(plan.request.decode.tp):
        tail = ", the tail's included" if plan.request.tail and rank == 0 else ""
        lines += [
            "",
            f"to decode rank {rank}: {_counted(plan.writes_to(rank), 'write')}{tail}, {_size(plan.bytes_to(rank))}",
        ]
        lines.append(_line(_HEADER, widths))
        lines += [
            _line(row, widths) for row, entry in zip(rows, plan.entries, strict=True) if entry.destination == rank
        ]
    total = _size(sum(entry.bytes for entry in plan.entries))
    lines += ["", f"expected count {plan.expected_count:,}, {total} in all"]
    return "\n".join([*lines, *_nic_lines(planned)])


def _setting(planned: Planned) -> list[str]:
    options, request = planned.options, planned.plan.request
    layout = "latent" if planned.shape.kv_heads is None else str(request.decode.layout).upper()
    prompt, page = _counted(options.prompt, "token"), _counted(options.page, "token")
    lines = [f"{planned.shape.name}: prompt of {prompt}, pages of {page}, {layout} blocks, {options.dtype}"]
    for number, part in enumerate(request.groups):
        entry = "a latent" if part.group.kv_heads is None else _counted(part.group.kv_heads, "KV head")
        lines.append(
            f"  {GROUP_NAMES[number]:<8} {_counted(part.group.layers, 'layer')}, {entry} of {part.head_dim} elements; "
            f"pages: {part.pages:,} to send, {options.present:,} there"
        )
    lines.append(f"  prefill  {_side_text(request.prefill)}")
    lines.append(f"  decode   {_side_text(request.decode)}")
    lines.append(f"  sources  {options.sources}, seed {options.seed}; the count does not depend on them")
    segments = max((entry.segments_per_block for entry in planned.plan.entries), default=1)
    if segments > 1 and request.decode.layout is KvLayout.NHD:
        lines.append(f"  NHD blocks cut by head take {segments} writes each; in HND they would take 2")
    return lines


def _side_text(side: ParallelLayout) -> str:
    ranks = _counted(side.tp, "rank")
    return ranks if side.dp == 1 else f"{side.dp} replicas of {ranks}; the request lives in one"


def _why_none(planned: Planned) -> str:
    if planned.options.prompt == 1:
        return "the prompt's last token is not prefilled, and it has no other"
    return "the decode side has all of the prompt's pages"


def _row(entry: RankWrites, paths: Iterable[NicShare]) -> tuple[str, ...]:
    numbers = (entry.layers, entry.pages, entry.segments_per_block, entry.segment_bytes, entry.writes, entry.bytes)
    nics = ", ".join(f"{path.source.name}>{path.destination.name}{_share(path)}" for path in paths)
    return (
        str(entry.source),
        GROUP_NAMES[entry.group],
        _span(entry.heads),
        *(f"{number:,}" for number in numbers),
        nics,
    )


def _span(heads: HeadRange | None) -> str:
    if heads is None:
        return "latent"
    return str(heads.first) if heads.count == 1 else f"{heads.first}-{heads.stop - 1}"


def _share(path: NicShare) -> str:
    return "" if path.share == 1 else f" {path.share}"


def _line(cells: Iterable[str], widths: list[int]) -> str:
    *numbers, nics = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return ("  " + "  ".join(numbers) + "  " + nics.strip()).rstrip()


def _nic_lines(planned: Planned) -> list[str]:
    lines = ["", "every NIC carries"]
    loads = (planned.assignment.prefill_load, planned.assignment.decode_load)
    for side, nics, load in zip(("prefill", "decode"), planned.nics, loads, strict=True):
        for rank, mine in enumerate(nics):
            carried = ", ".join(f"{nic.name} {_size(load[rank, nic.rail])}" for nic in mine)
            lines.append(f"  {side:<7}  rank {rank}: {carried}")
    return lines


def _size(count: int | Fraction) -> str:
    if not count:
        return "nothing"
    mib = float(count) / (1 << 20)
    return f"{mib:,.1f} MiB" if mib >= 0.1 else f"{float(count) / 1024:,.1f} KiB"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
