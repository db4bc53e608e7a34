import pytest

from pdserve.bench.transport import records
from pdserve.bench.transport.child_process import SideFailed
from pdserve.bench.transport.contest import Contest, Series, is_ours
from pdserve.bench.transport.load import MOST_BLOCKS, Load
from pdserve.bench.transport.pair import Round

LOADS = [Load("paged", 16384, 8), Load("paged", 65536, 2)]


class Made:
    """A contestant whose rounds take as long as it is told, and which fails from round `last` on."""

    def __init__(self, system, provider, seconds, log, last=100):
        self.system, self.provider = system, provider
        self._seconds, self._log, self._last, self.closed, self.rounds = seconds, log, last, False, 0

    def verify(self, load):
        return self.round(load)

    def round(self, load):
        self.rounds += 1
        if self.rounds > self._last:
            raise SideFailed(f"{self.system} has had enough")
        self._log.append((load, self.system))
        return Round(self._seconds, (self._seconds / 2, self._seconds / 4))

    def close(self):
        self.closed = True


def _contest(*contestants, told=None):
    return Contest(list(contestants), (told if told is not None else []).append, lambda: None)


def test_every_contestant_is_verified_first_and_then_takes_part_in_every_round():
    log = []
    contest = _contest(*(Made(name, "tcp", 1.0, log) for name in ("engine", "raw", "nixl")))
    every = contest.measure(LOADS, 5)
    assert [(s.system, s.load) for s in every] == [(n, load) for load in LOADS for n in ("engine", "raw", "nixl")]
    assert all(len(s.rounds) == 5 for s in every)
    for number, load in enumerate(LOADS):
        rounds = [system for at, system in log if at == load]
        assert rounds[:3] == ["engine", "raw", "nixl"]
        turns = [tuple(rounds[i : i + 3]) for i in range(3, len(rounds), 3)]
        assert all(sorted(turn) == ["engine", "nixl", "raw"] for turn in turns), number
        assert len(set(turns)) > 1


def test_another_library_that_fails_is_left_out_and_closed_and_the_rest_goes_on():
    told, log = [], []
    ours, other = Made("engine", "tcp", 1.0, log), Made("nixl", "tcp", 1.0, log, last=3)
    contest = _contest(ours, other, told=told)
    every = contest.measure(LOADS, 4)
    assert [(s.system, len(s.rounds)) for s in every] == [("engine", 4), ("nixl", 2), ("engine", 4)]
    assert other.closed and contest.contestants == [ours] and "nixl has had enough" in told[0]


def test_one_of_ours_that_fails_ends_the_benchmark():
    with pytest.raises(SideFailed, match="engine/2 NICs has had enough"):
        _contest(Made("engine/2 NICs", "tcp", 1.0, [], last=2)).measure(LOADS, 4)


def test_only_those_that_are_asked_for_take_part():
    contest = _contest(Made("engine", "tcp", 1.0, []), Made("nixl", "tcp", 1.0, []))
    assert [s.system for s in contest.measure(LOADS[:1], 2, is_ours)] == ["engine"]
    assert len(contest.contestants) == 2


def test_a_load_is_cut_to_memory_and_to_a_bearable_number_of_blocks():
    assert Load.over("paged", 1 << 20, 8 << 20) == Load("paged", 1 << 20, 8)
    assert Load.over("paged", 1024, 1 << 30).blocks == MOST_BLOCKS
    with pytest.raises(ValueError, match="does not fit"):
        Load.over("single", 1 << 20, 1 << 10)


def test_both_sides_derive_the_same_order_and_another_one_each_round():
    load = Load("paged", 64, 256)
    first, again, next_one = load.order(1), load.order(1), load.order(2)
    assert (first[0] == again[0]).all() and (first[1] == again[1]).all()
    assert (first[0] != next_one[0]).any() and sorted(first[1]) == list(range(256))
    source, target = Load("single", 64, 4).order(1)
    assert list(source) == list(target) == [0, 1, 2, 3]


def _series(system, provider, seconds, load=LOADS[0]):
    return Series(system, provider, load, tuple(Round(s, (s / 2, s / 4)) for s in seconds))


def test_shares_are_taken_within_a_round_and_on_the_same_provider():
    every = [
        _series("engine", "tcp", (1.0, 10.0, 2.0)),
        _series("raw", "tcp", (1.0, 8.0, 1.0)),
        _series("raw", "shm", (0.1, 0.1, 0.1)),
        _series("nixl", "tcp", (2.0, 20.0, 4.0)),
        _series("raw", "tcp", (1.0,), LOADS[1]),
    ]
    rows = records.share_rows(every)
    assert [(row["system"], row["of"], row["bytes"]) for row in rows] == [
        ("engine", "raw", 16384), ("engine", "nixl", 16384),
    ]  # fmt: skip
    assert (rows[0]["share_min"], rows[0]["share_median"], rows[0]["share_max"]) == (0.5, 0.8, 1.0)
    assert rows[1]["share_median"] == 2.0


def test_rows_have_the_keys_that_are_promised():
    paged = _series("engine", "tcp", (1.0, 2.0, 4.0))
    single = _series("engine", "tcp", (1.0,), Load("single", 65536, 2))
    (row,) = records.bandwidth_rows([paged])
    assert list(row) == [
        "system", "provider", "page_bytes", "gb_per_s_median", "gb_per_s_min", "gb_per_s_max", "rounds",
    ]  # fmt: skip
    assert row["gb_per_s_median"] == pytest.approx(16384 * 8 / 2e9) and row["rounds"] == 3
    assert list(records.bandwidth_rows([single])[0])[2] == "bytes"
    (row,) = records.cpu_rows([paged])
    assert row["s_per_gb"] == row["sender_s_per_gb"] + row["receiver_s_per_gb"]
    assert records.cpu_rows([Series("fabtests", "tcp", LOADS[0], (Round(1.0),))]) == []
    row = records.latency_row("engine", "tcp", "polled", [5.0, 1.0, 3.0])
    assert list(row) == ["system", "provider", "mode", "p50_us", "p99_us", "max_us"]
    assert row["p50_us"] == 3.0 and row["max_us"] == 5.0
    row = records.post_cost_row("engine", "tcp", 4000, [0.001, 0.002, 0.004])
    assert row["blocks"] == 4000 and row["us_per_block"] == pytest.approx(0.5)
    (row,) = records.operation_rows([_series("engine", "tcp", (2.0,), Load("immediate", 0, 100))])
    assert row["operation"] == "immediate" and row["per_s_median"] == 50.0
