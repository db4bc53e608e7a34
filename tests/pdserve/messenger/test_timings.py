"""A row per layer and chunk, whatever the ranks; joined where there would be too many; never a write lost."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from pdserve.messenger.timings import WriteLog, condensed
from pdserve.messenger.wire import LayerTiming
from tests.pdserve.engine.toy import eventually
from tests.pdserve.messenger.pair import loopback
from tests.pdserve.messenger.sharded import ShardedToy
from transport.errors import TransportClosed


@dataclass
class Ended:
    """A transfer of which `completed` writes have completed."""

    finished_at: float | None
    completed: int
    done: bool = True
    asked: list[str] = field(default_factory=list)

    def cancel(self) -> None:
        self.asked.append("cancel")
        raise TransportClosed("it is closed")


def log(*submitted: tuple[int, float, Ended]) -> WriteLog:
    made = WriteLog()
    made.begin_chunk(0, 16)
    for layer, posted_at, transfer in submitted:
        made.submitted(layer, (1.0, posted_at), cast(Any, transfer), 100)
    return made


def test_a_layer_is_one_row_over_all_pairs_of_ranks() -> None:
    chunks, rows = log((0, 2.0, Ended(5.0, 3)), (0, 2.5, Ended(4.0, 3)), (1, 3.0, Ended(6.0, 2))).summary()
    assert chunks == ((0, 16),)
    assert rows == (LayerTiming(0, 0, 1.0, 2.0, 5.0, 6, 200), LayerTiming(0, 1, 1.0, 3.0, 6.0, 2, 100))


def test_what_is_not_done_is_cancelled_and_a_closed_transport_is_no_matter() -> None:
    under_way, over = Ended(None, 0, done=False), Ended(5.0, 3)
    log((0, 2.0, under_way), (0, 2.0, over)).cancel()
    assert (under_way.asked, over.asked) == (["cancel"], [])


@given(st.integers(1, 40), st.integers(1, 5), st.integers(5, 64), st.data())
def test_joined_rows_say_the_same_of_every_layer(chunks: int, layers: int, most: int, data: st.DataObject) -> None:
    ranges = tuple((8 * number, 8 * number + 8) for number in range(chunks))
    numbers = st.integers(0, 9)
    rows = [
        LayerTiming(chunk, layer, 10.0 * chunk + layer, 10.0 * chunk + layer + 1, 10.0 * chunk + 9, *data.draw(pair))
        for chunk in range(chunks)
        for layer in range(layers)
        for pair in [st.tuples(numbers, numbers)]
    ]
    joined_ranges, joined = condensed(ranges, rows, most)
    assert len(joined_ranges) <= most and len(joined) <= most
    assert (joined_ranges[0][0], joined_ranges[-1][1]) == (0, 8 * chunks)
    assert all(end == start for (_, end), (start, _) in pairwise(joined_ranges))
    assert {row.chunk for row in joined} == set(range(len(joined_ranges)))
    assert _totals(joined) == _totals(rows)
    for row in joined:
        first, end = joined_ranges[row.chunk]
        merged = [each for each in rows if each.layer == row.layer and first <= 8 * each.chunk < end]
        assert row.computed_at == merged[0].computed_at and row.posted_at == merged[0].posted_at
        assert row.completed_at == merged[-1].completed_at
    if chunks * layers <= most:
        assert joined == tuple(rows)


def _totals(rows: Any) -> dict[int, tuple[int, int]]:
    totals: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for row in rows:
        writes, size = totals[row.layer]
        totals[row.layer] = writes + row.writes, size + row.bytes
    return dict(totals)


def test_what_done_tells_does_not_grow_with_the_ranks() -> None:
    """Eight latents to eight ranks: as many rows as layers and chunks."""
    with loopback() as network:
        network.add_prefill(model=ShardedToy(8, None))
        side = network.add_decode(model=ShardedToy(8, None))
        request = side.request("r", 60)
        side.check(request)
        network.settle()
        eventually(lambda: side.receiver.trace(request.request_id).timings is not None)  # type: ignore[union-attr]
        trace = side.receiver.trace(request.request_id)
        assert trace is not None and trace.timings is not None
        chunks = len(trace.timings.chunks)
        assert chunks == 4  # of 16 tokens
        assert len(trace.timings.layers) == side.model.config.layers * chunks
        assert sum(layer.writes for layer in trace.timings.layers) == trace.writes_expected == 8 * 8 * 2
