"""Packing is exact: what fits is found, what is refused cannot be placed, and hosts are never overcommitted."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.packing import Spread, Units, spread, units

CPU = st.integers(0, 6)
demands = st.lists(st.fixed_dictionaries({"CPU": st.integers(1, 3), "GPU": st.integers(0, 2)}), min_size=1, max_size=2)
host_lists = st.lists(st.fixed_dictionaries({"CPU": CPU, "GPU": st.integers(0, 4)}), max_size=4)


def test_fractions_add_up_exactly() -> None:
    assert units({"CPU": 0.1, "mark": 0.001}, 10) == {"CPU": 10_000, "mark": 100}
    assert spread([units({"CPU": 0.1})], [10], [units({"CPU": 1})]).missing == ()


def fits_somehow(wanted: list[Units], counts: list[int], hosts: list[Units]) -> bool:
    """Every node tries every host."""
    nodes = [demand for demand, count in zip(wanted, counts, strict=True) for _ in range(count)]
    for places in product(range(len(hosts)), repeat=len(nodes)):
        left = [dict(host) for host in hosts]
        for node, place in zip(nodes, places, strict=True):
            for name, amount in node.items():
                left[place][name] -= amount
        if all(amount >= 0 for host in left for amount in host.values()):
            return True
    return False


def check(found: Spread, wanted: list[Units], hosts: list[Units]) -> None:
    assert len(found.counts) == len(hosts)
    for counts, host in zip(found.counts, hosts, strict=True):
        for name, free in host.items():
            assert sum(count * demand[name] for count, demand in zip(counts, wanted, strict=True)) <= free


@settings(max_examples=200, deadline=None)
@given(demands, st.lists(st.integers(0, 2), min_size=2, max_size=2), host_lists)
def test_it_places_all_nodes_exactly_when_that_is_possible(
    wanted: list[Units], counts: list[int], hosts: list[Units]
) -> None:
    counts = counts[: len(wanted)]
    found = spread(wanted, counts, hosts)
    check(found, wanted, hosts)
    assert (not found.missing) == fits_somehow(wanted, counts, hosts)
    placed = [sum(column) for column in zip(*found.counts, strict=True)] or [0] * len(counts)
    missing = found.missing or (0,) * len(counts)
    assert [p + m for p, m in zip(placed, missing, strict=True)] == counts


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8))
def test_the_fullest_host_has_as_few_nodes_as_can_be(prefill: int, decode: int, hosts: int) -> None:
    found = spread([{"CPU": 1}, {"CPU": 1}], [prefill, decode], [{"CPU": 100}] * hosts)
    assert max(map(sum, found.counts)) == -(-(prefill + decode) // hosts)


def test_kinds_keep_apart_where_that_costs_nothing() -> None:
    found = spread([{"CPU": 1}, {"CPU": 1}], [2, 2], [{"CPU": 2}, {"CPU": 2}])
    assert sorted(found.counts) == [(0, 2), (2, 0)]


def test_a_large_cluster_is_searched_at_once() -> None:
    """100 hosts of 8 devices, 25 nodes of one kind and 75 of the other, all of them needed."""
    node = units({"GPU": 1}, 8)
    found = spread([node, node], [25, 75], [units({"GPU": 8})] * 100)
    assert not found.missing and all(sum(counts) == 1 for counts in found.counts)
    short = spread([node, node], [25, 76], [units({"GPU": 8})] * 100)
    assert sum(short.missing) == 1
