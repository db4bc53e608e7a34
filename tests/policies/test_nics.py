"""Which NICs carry which ranks: shares add up, loads are even, rails are kept, and every NIC carries its part."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.nics import RankNic, assign_nics, even_nics, nics_of, rails_of, share_nics
from policies.plan import GroupPages, PlanRequest, TransferPlan, make_plan
from policies.sharding import LayerGroup, ParallelLayout, ShardingError
from policies.sources import draw_sources
from transport.topology import DevicePlacement, Gpu, Nic


def plan_of(group: LayerGroup, prefill: int, decode: int, random: Random) -> TransferPlan:
    request = PlanRequest((GroupPages(group, 128, 2, 64),), ParallelLayout(prefill), ParallelLayout(decode), 64)
    return make_plan(request, draw_sources([group], (prefill, decode), random))


def nics(*rails: int) -> tuple[RankNic, ...]:
    return tuple(RankNic(f"mlx5_{rail}", rail) for rail in rails)


def side_loads(here: tuple[RankNic, ...], there: tuple[RankNic, ...]) -> tuple[list[Fraction], list[Fraction]]:
    shares = share_nics(here, there)
    mine = [sum((s.share for s in shares if s.source == nic), Fraction(0)) for nic in here]
    its = [sum((s.share for s in shares if s.destination == nic), Fraction(0)) for nic in there]
    return mine, its


def test_three_nics_towards_two_carry_a_third_and_a_half_each() -> None:
    assert side_loads(nics(0, 1, 2), nics(0, 1)) == ([Fraction(1, 3)] * 3, [Fraction(1, 2)] * 2)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True),
    st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True),
)
def test_each_nic_of_a_side_carries_the_same_share(here: list[int], there: list[int]) -> None:
    mine, its = side_loads(nics(*here), nics(*there))
    assert mine == [Fraction(1, len(here))] * len(here)
    assert its == [Fraction(1, len(there))] * len(there)


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_equal_sides_keep_to_their_rails(here: list[int], there: list[int]) -> None:
    shares = share_nics(nics(*here), nics(*there))
    assert len(shares) == 4 and all(share.on_rail for share in shares)


@given(
    st.sampled_from([LayerGroup(3, None), LayerGroup(3, 4), LayerGroup(3, 8)]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_both_sides_loads_are_the_plans_bytes(
    group: LayerGroup, prefill: int, decode: int, counts: tuple[int, int]
) -> None:
    plan = plan_of(group, prefill, decode, Random(1))
    done = assign_nics(plan, even_nics(prefill, counts[0]), even_nics(decode, counts[1]))
    total = sum(entry.bytes for entry in plan.entries)
    assert sum(done.prefill_load.values()) == sum(done.decode_load.values()) == total
    assert len(done.prefill_load) == prefill * counts[0] and len(done.decode_load) == decode * counts[1]
    for rank in range(decode):
        loads = {load for (owner, _), load in done.decode_load.items() if owner == rank}
        assert loads == {Fraction(plan.bytes_to(rank), counts[1])}, "a destination's NICs share evenly"


def test_every_source_nic_carries_its_share_over_many_requests() -> None:
    """Two NICs on each of 8 latent ranks towards one destination: sixteen NICs, each a sixteenth (chi-square)."""
    random, requests = Random(5), 4_000
    carried: defaultdict[tuple[int, int], float] = defaultdict(float)
    for _ in range(requests):
        plan = plan_of(LayerGroup(1, None), 8, 1, random)
        done = assign_nics(plan, even_nics(8, 2), even_nics(1, 2))
        for nic, load in done.prefill_load.items():
            carried[nic] += float(load / plan.bytes_to(0)) * 2  # in handoffs that this NIC had a half of
    assert len(carried) == 16
    counts = [carried[nic] for nic in sorted(carried)][::2]
    mean = requests / 8
    assert sum((count - mean) ** 2 for count in counts) / mean < 24.32  # 7 degrees of freedom, 1 in 1000
    assert all(carried[rank, 2 * rank] == carried[rank, 2 * rank + 1] for rank in range(8))


def test_by_rail_a_rank_is_served_over_its_own_rails() -> None:
    sources, targets = even_nics(8, 2), even_nics(8, 2)
    (assignment,) = draw_sources([LayerGroup(1, None)], (8, 8), Random(0), (rails_of(sources), rails_of(targets)))
    assert assignment == tuple(range(8))
    plan = plan_of(LayerGroup(1, 8), 8, 8, Random(0))
    done = assign_nics(plan, sources, targets)
    assert all(share.on_rail for shares in done.paths for share in shares)


def test_nics_come_from_the_placement_of_the_devices() -> None:
    def nic(rail: int) -> Nic:
        return Nic(f"mlx5_{rail}", None, 0, 400.0, "InfiniBand", "mlx5_core", True, rail)

    placements = [DevicePlacement(Gpu(k, f"0000:0{k}:00.0", 0), (nic(2 * k), nic(2 * k + 1)), 0, 1) for k in range(2)]
    assert nics_of(placements) == (nics(0, 1), nics(2, 3))


def test_a_rank_without_a_nic_and_a_wrong_number_of_ranks_are_refused() -> None:
    with pytest.raises(ShardingError, match="NICs: 1 at the prefill rank, 0 at the decode rank"):
        share_nics(nics(0), ())
    with pytest.raises(ShardingError, match="NICs are given for 4 ranks at decode; its replica has 8"):
        assign_nics(plan_of(LayerGroup(1, 8), 8, 8, Random(0)), even_nics(8, 1), even_nics(4, 1))
