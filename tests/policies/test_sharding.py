"""The worked cases: the right-hand numbers are exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.layout import HeadRange, KvLayout
from policies.sharding import (
    LayerGroup,
    ParallelLayout,
    ShardingError,
    Shards,
    check_bridge,
    expected_count,
    heads_per_rank,
    pages_sent,
    shards,
    shares,
    writes_per_rank,
)

QWEN = LayerGroup(layers=62, kv_heads=8)
R1 = LayerGroup(layers=61, kv_heads=None)
HND, NHD = KvLayout.HND, KvLayout.NHD


@pytest.mark.parametrize(
    ("group", "prefill", "decode", "present", "writes"),
    [
        (QWEN, ParallelLayout(8), ParallelLayout(8), 0, 3_968),
        (QWEN, ParallelLayout(8), ParallelLayout(4), 0, 15_872),
        (QWEN, ParallelLayout(4), ParallelLayout(8), 0, 7_936),
        (QWEN, ParallelLayout(4, NHD), ParallelLayout(8, NHD), 0, 507_904),
        (QWEN, ParallelLayout(8, NHD), ParallelLayout(8, NHD), 0, 3_968),
        (QWEN, ParallelLayout(16), ParallelLayout(16), 0, 3_968),
        (R1, ParallelLayout(8), ParallelLayout(8), 0, 3_904),
        (R1, ParallelLayout(8), ParallelLayout(1, dp=8), 0, 3_904),
        (QWEN, ParallelLayout(8), ParallelLayout(8), 10, 3_348),
        (QWEN, ParallelLayout(16), ParallelLayout(8), 0, 3_968),
    ],
)
def test_worked_cases_at_4097_tokens_and_64_token_pages(
    group: LayerGroup, prefill: ParallelLayout, decode: ParallelLayout, present: int, writes: int
) -> None:
    pages = pages_sent(4_096, 64, present)
    assert writes_per_rank([(group, pages)], prefill, decode, 64) == (writes,) * decode.tp
    assert expected_count([(group, pages)], prefill, decode, 64) == writes * decode.tp


def test_a_drafter_group_and_the_tail_are_counted() -> None:
    drafter = LayerGroup(layers=1, kv_heads=None)
    groups = [(R1, pages_sent(4_097, 64)), (drafter, pages_sent(4_096, 64))]
    assert expected_count(groups, ParallelLayout(8), ParallelLayout(1, dp=8), 64, tail=True) == 4_030


def test_one_token_prompt_needs_no_write() -> None:
    assert expected_count([(QWEN, pages_sent(0, 64))], ParallelLayout(8), ParallelLayout(8), 64) == 0


def test_ranks_that_split_the_heads_askew_are_owed_different_numbers() -> None:
    """12 heads on 4 ranks (3 each) to 6 ranks (2 each): every third destination takes from two sources."""
    group = LayerGroup(layers=1, kv_heads=12)
    assert writes_per_rank([(group, 1)], ParallelLayout(4), ParallelLayout(6), 16) == (2, 4, 2, 2, 4, 2)


def test_more_ranks_than_heads_hold_neighbouring_copies() -> None:
    sixteen = shards(QWEN, 16)
    assert sixteen == Shards(members=8, copies=2, heads=1)
    assert [sixteen.rank(0, m) for m in range(8)] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert [sixteen.rank(1, m) for m in range(8)] == [1, 3, 5, 7, 9, 11, 13, 15]
    assert shards(R1, 8) == Shards(members=1, copies=8, heads=None)


def test_heads_that_do_not_divide_are_refused_with_the_numbers() -> None:
    assert heads_per_rank(3, 3) == 1
    with pytest.raises(ShardingError, match="3 KV heads cannot be shared by 2 ranks"):
        heads_per_rank(3, 2)
    with pytest.raises(ShardingError, match="8 KV heads cannot be shared by 3 ranks at decode"):
        expected_count([(QWEN, 1)], ParallelLayout(8), ParallelLayout(3), 64)


def test_what_cannot_be_bridged_is_refused_by_field_and_both_values() -> None:
    one = ParallelLayout()
    with pytest.raises(ShardingError, match="KV layouts differ: hnd at prefill, nhd at decode"):
        expected_count([(QWEN, 1)], one, ParallelLayout(1, NHD), 64)
    with pytest.raises(ShardingError, match="page sizes differ: 64 tokens at prefill, 32 at decode"):
        check_bridge(one, one, 64, 32)
    with pytest.raises(ShardingError, match="tp at decode is 0; it must be at least 1"):
        check_bridge(one, ParallelLayout(0), 64, 64)


@given(st.integers(1, 24), st.integers(1, 48), st.integers(1, 48))
def test_shares_give_each_destination_its_heads_once(heads: int, source_tp: int, target_tp: int) -> None:
    group = LayerGroup(1, heads)
    try:
        source, target = shards(group, source_tp), shards(group, target_tp)
    except ShardingError:
        assert any(heads % tp and tp % heads for tp in (source_tp, target_tp))
        return
    common = shares(source, target)
    for member in range(target.members):
        got = [share for share in common if share.destination == member]
        wanted = target.heads_of(member)
        assert [h for s in got if s.heads for h in range(s.heads.first, s.heads.stop)] == list(
            range(wanted.first, wanted.stop)
        )
        for share in got:
            have = source.heads_of(share.source)
            assert share.heads == have.overlap(wanted)
            assert share.cut == (not share.heads == have == wanted)


@given(st.integers(1, 24), st.integers(1, 48))
def test_every_replica_set_holds_the_whole_cache_and_every_rank_is_in_one(heads: int, tp: int) -> None:
    if heads % tp and tp % heads:
        return
    cache = shards(LayerGroup(1, heads), tp)
    ranks = [cache.rank(s, m) for s in range(cache.copies) for m in range(cache.members)]
    assert sorted(ranks) == list(range(tp))
    covered = [h for m in range(cache.members) for h in range(cache.heads_of(m).first, cache.heads_of(m).stop)]
    assert covered == list(range(heads))
    if tp > heads:
        assert all(cache.heads_of(m) == HeadRange(cache.rank(0, m) // (tp // heads), 1) for m in range(cache.members))
