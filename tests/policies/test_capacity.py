"""The balance of prefill and decode nodes, by hand and by its own laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.capacity import (
    NodeRates,
    Workload,
    decode_nodes_per_prefill_node,
    decode_requests_per_s,
    nodes_for,
    prefill_requests_per_s,
    running_requests,
    transfer_bytes_per_s,
)

rates = st.builds(NodeRates, st.floats(1, 1e6), st.floats(1, 1e6), st.floats(0.1, 1))
workloads = st.builds(Workload, st.floats(1, 1e5), st.floats(1, 1e4), st.floats(0, 0.9))


def test_one_prefill_node_of_three_requests_a_second_feeds_three_of_one() -> None:
    workload = Workload(prompt_tokens=4_000, output_tokens=500)
    node = NodeRates(prefill_tokens_per_s=12_000, decode_tokens_per_s=500, utilisation=1.0)
    assert prefill_requests_per_s(node, workload) == 3.0
    assert decode_requests_per_s(node, workload) == 1.0
    assert decode_nodes_per_prefill_node(node, workload) == 3.0
    assert nodes_for(9.0, node, workload) == (3, 9)


def test_a_decode_node_that_takes_more_than_prefill_gives_needs_several_prefill_nodes() -> None:
    """Three requests a second of prefill, eight of decode: 3 of 8 decode nodes per prefill node."""
    node = NodeRates(12_000, 4_000, utilisation=1.0)
    assert decode_nodes_per_prefill_node(node, Workload(4_000, 500)) == 0.375
    assert nodes_for(8.0, node, Workload(4_000, 500)) == (3, 1)


def test_prefix_hits_free_prefill_and_the_wire() -> None:
    half = Workload(4_000, 500, cached_share=0.5)
    assert prefill_requests_per_s(NodeRates(12_000, 500, 1.0), half) == 6.0
    assert transfer_bytes_per_s(2.0, half, 70_272.0) == 2 * 2_000 * 70_272


def test_streams_in_flight_follow_from_their_speed() -> None:
    assert running_requests(8.0, Workload(1_000, 500), 50.0) == 80.0


@given(rates, workloads, st.floats(0, 1e3))
def test_the_nodes_hold_the_rate_and_one_less_would_not(node: NodeRates, work: Workload, rate: float) -> None:
    prefill, decode = nodes_for(rate, node, work)
    for count, each in ((prefill, prefill_requests_per_s(node, work)), (decode, decode_requests_per_s(node, work))):
        assert count * each >= rate * (1 - 1e-6)
        assert count == 1 or (count - 1) * each < rate * (1 + 1e-6)


@given(rates, workloads)
def test_the_ratio_does_not_depend_on_utilisation(node: NodeRates, work: Workload) -> None:
    full = NodeRates(node.prefill_tokens_per_s, node.decode_tokens_per_s, 1.0)
    assert decode_nodes_per_prefill_node(node, work) == pytest.approx(decode_nodes_per_prefill_node(full, work))


def test_impossible_numbers_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="cached_share is 1, allowed: from 0 to below 1"):
        Workload(10, 10, 1.0)
    with pytest.raises(ValueError, match=r"prompt_tokens \(0\) and output_tokens \(5\) must be at least 1"):
        Workload(0, 5)
    with pytest.raises(ValueError, match=r"decode_tokens_per_s \(0\) must be above 0"):
        NodeRates(1, 0)
    with pytest.raises(ValueError, match=r"utilisation is 1\.5"):
        NodeRates(1, 1, 1.5)
    with pytest.raises(ValueError, match="requests_per_s is -1"):
        nodes_for(-1, NodeRates(1, 1), Workload(1, 1))
    with pytest.raises(ValueError, match="tokens_per_s_and_stream is 0"):
        running_requests(1, Workload(1, 1), 0)
