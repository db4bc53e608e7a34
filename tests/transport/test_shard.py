"""How NICs are paired and blocks are dealt: the rules of the layout document, over all small cases."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transport.shard import deal, pairings

_rails = st.lists(st.integers(0, 7), min_size=1, max_size=6).map(tuple)
_distinct_rails = st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True).map(tuple)


def _loads(ways, side):
    return Counter(pair[side] for pairs in ways for pair in pairs)


def test_three_nics_towards_two_share_six_parts():
    ways = pairings((0, 1, 2), (0, 1))
    assert ways == (((0, 0), (1, 1), (2, 0)), ((0, 0), (1, 1), (2, 1)))
    assert _loads(ways, 0) == {0: 2, 1: 2, 2: 2} and _loads(ways, 1) == {0: 3, 1: 3}
    assert pairings((0, 1), (0, 1, 2)) == tuple(tuple((j, i) for i, j in pairs) for pairs in ways)


def test_equal_sides_meet_on_their_rails():
    assert pairings((0, 1, 2), (2, 0, 1)) == (((0, 1), (1, 2), (2, 0)),)
    assert pairings((4,), (9,)) == (((0, 0),),)


@given(_rails, _rails)
def test_every_pairing_has_as_many_pairs_as_the_longer_side_and_uses_all_nics(here, there):
    most = max(len(here), len(there))
    for pairs in pairings(here, there):
        assert len(pairs) == len(set(pairs)) == most
        assert {i for i, _ in pairs} == set(range(len(here))) and {j for _, j in pairs} == set(range(len(there)))


@given(_rails, _rails)
def test_loads_are_as_even_as_the_numbers_allow(here, there):
    ways = pairings(here, there)
    for side in (0, 1):
        assert len(set(_loads(ways, side).values())) == 1, "over all pairings"
        for pairs in ways:
            loads = _loads([pairs], side).values()
            assert max(loads) - min(loads) <= 1, "in each"


@given(_rails, _rails)
@example((0, 1, 2, 2), (0, 0, 1, 2))
def test_no_more_pairs_could_stay_on_their_rail(here, there):
    """What each NIC of the shorter side is matched with first; the longer side's rest has no claim."""
    possible = sum(min(here.count(rail), there.count(rail)) for rail in set(here))
    for pairs in pairings(here, there):
        assert sum(here[i] == there[j] for i, j in pairs) >= possible


@given(_distinct_rails, _distinct_rails)
def test_a_rail_that_both_have_is_a_pair(here, there):
    for pairs in pairings(here, there):
        assert {(here.index(rail), there.index(rail)) for rail in set(here) & set(there)} <= set(pairs)


@pytest.mark.parametrize(("here", "there"), [((), (0,)), ((0,), ()), ((), ())])
def test_a_side_without_a_nic_is_refused(here, there):
    with pytest.raises(ValueError, match="without a NIC"):
        pairings(here, there)


@given(st.integers(0, 5000), st.integers(1, 9), st.integers(0, 100))
def test_dealing_is_exact_contiguous_and_even(blocks, paths, first):
    ranges = deal(blocks, paths, first)
    assert [block for _, start, stop in ranges for block in range(start, stop)] == list(range(blocks))
    assert len({path for path, _, _ in ranges}) == len(ranges) == min(blocks, paths)
    lengths = [stop - start for _, start, stop in ranges]
    if blocks:
        assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)
        assert ranges[0][0] == first % paths
        assert [path for path, _, _ in ranges] == [(first + k) % paths for k in range(len(ranges))]


@given(st.integers(1, 40), st.integers(1, 6))
def test_a_rotating_start_evens_out_what_does_not_divide(blocks, paths):
    loads = Counter()
    for first in range(paths):
        for path, start, stop in deal(blocks, paths, first):
            loads[path] += stop - start
    assert set(loads.values()) == {blocks}


def test_nothing_can_be_dealt_to_no_path():
    with pytest.raises(ValueError, match="no path"):
        deal(4, 0)
