"""The draw of source replica sets: permutations, rails, and that every source carries its share."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from policies.sharding import LayerGroup, shards, shares
from policies.sources import draw_sources, rail_sources, random_sources

LATENT, HEADS = LayerGroup(61, None), LayerGroup(62, 8)
sizes = st.integers(1, 16)

CHI_SQUARE_7_AT_1_IN_1000 = 24.32
"""Quantile of the chi-square distribution with 7 degrees of freedom."""


def chi_square(observed: list[int]) -> float:
    mean = sum(observed) / len(observed)
    return sum((count - mean) ** 2 for count in observed) / mean


@given(sizes, sizes, st.integers(0, 99), st.booleans())
def test_no_source_serves_twice_while_another_idles(sources: int, targets: int, seed: int, by_rail: bool) -> None:
    random = Random(seed)
    nearness = {(s, d): Random(s * 99 + d).randrange(3) for s in range(sources) for d in range(targets)}
    chosen = (
        rail_sources(sources, targets, random, lambda s, d: nearness[s, d])
        if by_rail
        else random_sources(sources, targets, random)
    )
    assert len(chosen) == targets and set(chosen) <= set(range(sources))
    loads = [chosen.count(source) for source in range(sources)]
    assert max(loads) - min(loads) <= 1


@given(sizes, sizes, st.integers(0, 99))
def test_a_draw_repeats_with_its_seed(sources: int, targets: int, seed: int) -> None:
    assert random_sources(sources, targets, Random(seed)) == random_sources(sources, targets, Random(seed))


def test_every_source_carries_its_share_of_single_destination_requests() -> None:
    """8 latent source ranks, one destination rank: each serves an eighth of the requests."""
    random = Random(7)
    served = Counter(draw_sources([LATENT], (8, 1), random)[0][0] for _ in range(8_000))
    assert chi_square([served[rank] for rank in range(8)]) < CHI_SQUARE_7_AT_1_IN_1000


def test_every_source_rank_carries_its_share_where_sets_have_several_members() -> None:
    """16 ranks hold 8 heads twice: whichever set is drawn, its eight ranks write; over many requests all sixteen do."""
    random, source = Random(11), shards(HEADS, 16)
    written = Counter[int]()
    for _ in range(4_000):
        ((chosen,),) = draw_sources([HEADS], (16, 8), random)
        written.update(source.rank(chosen, share.source) for share in shares(source, shards(HEADS, 8)))
    per_head = [(written[2 * head], written[2 * head + 1]) for head in range(8)]
    assert all(sum(pair) == 4_000 for pair in per_head)
    assert all(chi_square(list(pair)) < 10.83 for pair in per_head)  # one degree of freedom, 1 in 1000


def test_groups_of_one_sharding_come_from_the_same_set_and_others_are_drawn_apart() -> None:
    drafter = LayerGroup(1, None)
    for seed in range(20):
        target, small, heads = draw_sources([LATENT, drafter, HEADS], (8, 4), Random(seed))
        assert target == small and len(heads) == 1


def test_by_rail_each_destination_takes_the_source_on_its_rail() -> None:
    eight = [frozenset({rank}) for rank in range(8)]
    for seed in range(10):
        assert draw_sources([LATENT], (8, 8), Random(seed), (eight, eight)) == (tuple(range(8)),)
        assert draw_sources([LATENT], (8, 1), Random(seed), (eight, [frozenset({5})])) == ((5,),)


def test_by_rail_sources_that_are_equally_near_share_the_work() -> None:
    random, nowhere = Random(3), [frozenset[int]()] * 8
    served = Counter(draw_sources([LATENT], (8, 1), random, (nowhere, [frozenset({1})]))[0][0] for _ in range(4_000))
    assert chi_square([served[rank] for rank in range(8)]) < CHI_SQUARE_7_AT_1_IN_1000


def test_by_rail_sets_are_compared_rank_by_rank() -> None:
    """Even and odd ranks hold the heads; the destination's NICs are on the odd ranks' rails."""
    here = [frozenset({rank}) for rank in range(16)]
    there = [frozenset({2 * rank + 1}) for rank in range(8)]
    assert draw_sources([HEADS], (16, 8), Random(0), (here, there)) == ((1,),)
