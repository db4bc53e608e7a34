"""Plans, carried out on arrays: what arrives is the source's cache, each byte once, as often as was counted."""

from __future__ import annotations

import dataclasses
import sys
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from policies.dry_run import RankMemory, carry_out
from policies.layout import HeadRange, KvLayout, PageGeometry
from policies.plan import GroupPages, PlanRequest, TransferPlan, make_plan, prompt_pages
from policies.sharding import LayerGroup, ParallelLayout, ShardingError, expected_count, heads_per_rank, writes_per_rank
from policies.sources import draw_sources

HND, NHD = KvLayout.HND, KvLayout.NHD
QWEN, R1, R1_DRAFTER = LayerGroup(62, 8), LayerGroup(61, None), LayerGroup(1, None)


def plan_of(request: PlanRequest, seed: int = 0) -> TransferPlan:
    groups = [part.group for part in request.groups]
    return make_plan(request, draw_sources(groups, (request.prefill.tp, request.decode.tp), Random(seed)))


# ---------------------------------------------------------------------------- a small cache, laid out by numpy alone


@dataclasses.dataclass(frozen=True)
class Side:
    """All ranks of one replica; `content[group][rank]` is `(layers, pool pages, *block, element)` bytes."""

    parallel: ParallelLayout
    geometries: list[PageGeometry]
    content: list[list[NDArray[Any]]]
    tables: list[list[NDArray[np.int64]]]
    hits: list[list[NDArray[np.int64]]]

    def memories(self) -> dict[tuple[int, int], RankMemory]:
        return {
            (group, rank): RankMemory(
                blocks.reshape(-1), geometry.layer_stride_bytes, self.tables[group][rank], self.hits[group][rank]
            )
            for group, geometry in enumerate(self.geometries)
            for rank, blocks in enumerate(self.content[group])
        }


def empty_side(request: PlanRequest, parallel: ParallelLayout, draw: np.random.Generator) -> Side:
    side = Side(parallel, [], [], [], [])
    for part in request.groups:
        heads = None if part.group.kv_heads is None else heads_per_rank(part.group.kv_heads, parallel.tp)
        pool = part.pages + int(draw.integers(1, 4))
        geometry = PageGeometry(
            part.group.layers, heads, part.head_dim, request.page_size, part.element_bytes, pool, parallel.layout
        )
        shape = (part.group.layers, pool, *geometry.block_shape, part.element_bytes)
        side.geometries.append(geometry)
        side.content.append([np.zeros(shape, np.uint8) for _ in range(parallel.tp)])
        side.tables.append([draw.permutation(pool)[: part.pages].astype(np.int64) for _ in range(parallel.tp)])
        side.hits.append([np.zeros(geometry.region_bytes, np.int64) for _ in range(parallel.tp)])
    return side


def rank_view(cache: NDArray[Any], part: GroupPages, parallel: ParallelLayout, rank: int) -> NDArray[Any]:
    """What `rank` holds of the logical cache `(layers, pages, tokens, [2, heads,] dim, element)`, as blocks."""
    heads = part.group.kv_heads
    if heads is None:
        return cache
    mine = heads_per_rank(heads, parallel.tp)
    first = rank * heads // parallel.tp
    view = cache[..., first : first + mine, :, :]
    return view.transpose(0, 1, 3, 4, 2, 5, 6) if parallel.layout is HND else view.transpose(0, 1, 3, 2, 4, 5, 6)


def logical_cache(part: GroupPages, page_size: int, draw: np.random.Generator) -> NDArray[Any]:
    vector = (part.head_dim,) if part.group.kv_heads is None else (2, part.group.kv_heads, part.head_dim)
    shape = (part.group.layers, part.pages, page_size, *vector, part.element_bytes)
    return draw.integers(1, 256, shape, dtype=np.uint8)


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    layout, page_size = draw(st.sampled_from(KvLayout)), draw(st.integers(1, 5))
    heads = draw(st.sampled_from([None, 1, 2, 3, 4, 6, 8, 12]))
    fitting = [tp for tp in range(1, 13) if heads is None or heads % tp == 0 or tp % heads == 0]
    prefill, decode = draw(st.sampled_from(fitting)), draw(st.sampled_from(fitting))
    prompt = draw(st.integers(1, 24))
    present = draw(st.integers(0, prompt // page_size))
    pages = prompt_pages(prompt, page_size, present)
    layers = [draw(st.integers(1, 3)), *([1] if draw(st.booleans()) else [])]
    parts = tuple(
        GroupPages(LayerGroup(n, heads), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2])), some)
        for n, some in zip(layers, pages, strict=False)
    )
    tail = draw(st.booleans()) and pages[0] > 0
    return PlanRequest(parts, ParallelLayout(prefill, layout), ParallelLayout(decode, layout), page_size, tail)


@settings(max_examples=150, deadline=None)
@given(requests(), st.integers(0, 1 << 30))
def test_the_destination_holds_the_sources_cache_every_byte_written_once(request: PlanRequest, seed: int) -> None:
    draw = np.random.default_rng(seed)
    source, target = empty_side(request, request.prefill, draw), empty_side(request, request.decode, draw)
    caches = [logical_cache(part, request.page_size, draw) for part in request.groups]
    for group, (part, cache) in enumerate(zip(request.groups, caches, strict=True)):
        for rank in range(request.prefill.tp):
            source.content[group][rank][:, source.tables[group][rank]] = rank_view(cache, part, request.prefill, rank)

    plan = plan_of(request, seed)
    landed = carry_out(plan, source.memories(), target.memories())

    for group, (part, cache) in enumerate(zip(request.groups, caches, strict=True)):
        for rank in range(request.decode.tp):
            table = target.tables[group][rank]
            wanted = np.zeros_like(target.content[group][rank])
            wanted[:, table] = rank_view(cache, part, request.decode, rank)
            assert np.array_equal(target.content[group][rank], wanted), "and no byte outside the pages"
            assert np.array_equal(target.hits[group][rank], (wanted != 0).reshape(-1)), "each byte once"
    counted = [(part.group, part.pages) for part in request.groups]
    expected = writes_per_rank(counted, request.prefill, request.decode, request.page_size)
    assert tuple(landed[rank] for rank in range(request.decode.tp)) == expected
    assert [plan.writes_to(rank) for rank in range(request.decode.tp)][1:] == list(expected[1:])
    assert plan.expected_count == sum(landed.values()) + request.tail
    assert plan.expected_count == expected_count(
        counted, request.prefill, request.decode, request.page_size, tail=request.tail
    )
    assert sum(plan.bytes_to(rank) for rank in range(request.decode.tp)) == sum(
        int(hits.sum()) for ranks in target.hits for hits in ranks
    )


# ---------------------------------------------------------------------------- worked cases


def request_of(
    group: LayerGroup, prefill: ParallelLayout, decode: ParallelLayout, *, prompt: int = 4_097, present: int = 0
) -> PlanRequest:
    head_dim = 576 if group.kv_heads is None else 128
    part = GroupPages(group, head_dim, 2, prompt_pages(prompt, 64, present)[0])
    return PlanRequest((part,), prefill, decode, 64)


@pytest.mark.parametrize(
    ("group", "prefill", "decode", "sources", "writes", "segment_bytes"),
    [
        (QWEN, ParallelLayout(8), ParallelLayout(8), 1, 3_968, 32 << 10),
        (QWEN, ParallelLayout(8), ParallelLayout(4), 2, 15_872, 16 << 10),
        (QWEN, ParallelLayout(4), ParallelLayout(8), 1, 7_936, 16 << 10),
        (QWEN, ParallelLayout(4, NHD), ParallelLayout(8, NHD), 1, 507_904, 256),
        (QWEN, ParallelLayout(16), ParallelLayout(16), 1, 3_968, 32 << 10),
        (R1, ParallelLayout(8), ParallelLayout(8), 1, 3_904, 72 << 10),
        (R1, ParallelLayout(8), ParallelLayout(1, dp=8), 1, 3_904, 72 << 10),
        (QWEN, ParallelLayout(16), ParallelLayout(8), 1, 3_968, 32 << 10),
    ],
)
def test_worked_cases_rank_by_rank(
    group: LayerGroup, prefill: ParallelLayout, decode: ParallelLayout, sources: int, writes: int, segment_bytes: int
) -> None:
    plan = plan_of(request_of(group, prefill, decode))
    for rank in range(decode.tp):
        entries = [entry for entry in plan.entries if entry.destination == rank]
        assert len(entries) == sources
        assert plan.writes_to(rank) == writes
        assert {entry.segment_bytes for entry in entries} == {segment_bytes}
        assert plan.bytes_to(rank) == writes * segment_bytes


def test_sixteen_ranks_exchange_within_the_even_and_the_odd_ones() -> None:
    plan = plan_of(request_of(QWEN, ParallelLayout(16), ParallelLayout(16)))
    for entry in plan.entries:
        assert entry.heads == HeadRange(entry.destination // 2, 1)
        assert entry.source // 2 == entry.destination // 2
    shift = {(entry.source - entry.destination) % 2 for entry in plan.entries}
    assert len(shift) == 1, "a set comes from one set"


def test_a_source_of_two_heads_cuts_its_block_for_two_destinations() -> None:
    plan = plan_of(request_of(QWEN, ParallelLayout(4), ParallelLayout(8)))
    (entry,) = [entry for entry in plan.entries if entry.destination == 3]
    assert (entry.source, entry.heads) == (1, HeadRange(3, 1))
    half, quarter = 32 << 10, 16 << 10
    numbers = entry.layer_writes(5, source_layer_bytes=1 << 30, target_layer_bytes=1 << 29)
    assert dataclasses.astuple(numbers) == (quarter, (5 << 30) + quarter, half, 5 << 29, quarter)
    assert entry.source_segments.index(np.array([7, 2])).tolist() == [14, 15, 4, 5]


def test_pages_that_are_there_do_not_travel_and_a_drafter_ends_a_token_earlier() -> None:
    assert plan_of(request_of(QWEN, ParallelLayout(8), ParallelLayout(8), present=10)).writes_to(5) == 3_348
    assert prompt_pages(1, 64) == (0, 0)
    target, drafter = prompt_pages(4_098, 64)
    parts = (GroupPages(R1, 576, 2, target), GroupPages(R1_DRAFTER, 576, 2, drafter))
    plan = plan_of(PlanRequest(parts, ParallelLayout(8), ParallelLayout(1, dp=8), 64, tail=True))
    assert plan.expected_count == plan.writes_to(0) == 4_030
    assert len({entry.source for entry in plan.entries}) == 1, "a drafter's latent comes from the rank of the target's"


def test_nothing_travels_for_a_prompt_of_one_token() -> None:
    plan = plan_of(request_of(QWEN, ParallelLayout(8), ParallelLayout(4), prompt=1))
    assert plan.entries == () and plan.expected_count == 0


def test_other_layouts_and_head_counts_are_refused() -> None:
    with pytest.raises(ShardingError, match="KV layouts differ: hnd at prefill, nhd at decode"):
        make_plan(request_of(QWEN, ParallelLayout(8), ParallelLayout(8, NHD)), [(0,)])
    with pytest.raises(ShardingError, match="8 KV heads cannot be shared by 3 ranks at prefill"):
        plan_of(request_of(QWEN, ParallelLayout(3), ParallelLayout(8)))


def test_a_full_size_plan_is_one_entry_per_pair_of_ranks() -> None:
    """62 layers, 128K tokens, NHD: 16 million writes, held as eight entries and two indices that all layers share."""
    request = request_of(QWEN, ParallelLayout(4, NHD), ParallelLayout(8, NHD), prompt=128 * 1_024 + 1)
    plan = plan_of(request)
    assert len(plan.entries) == 8
    assert plan.expected_count == 8 * 62 * 2_048 * 128 == 130_023_424
    pages = np.arange(2_048)
    indices = [side.index(pages) for side in (plan.entries[0].source_segments, plan.entries[0].target_segments)]
    assert sum(index.nbytes for index in indices) < 5_000_000
    assert sum(sys.getsizeof(entry) for entry in plan.entries) < 10_000
