from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.api import make_imm, split_imm
from transport.imm import ImmediateCounters


def _values(*imms):
    return np.array(imms, np.int64)


def _count(counters, *imms):
    for on_full, imm in counters.count(_values(*imms)):
        on_full(imm)


def _never(_):
    raise AssertionError("must not be called")


def test_imm_packs_slot_and_generation():
    assert split_imm(make_imm(5, 3)) == (5, 3)
    assert make_imm(1, 4096 + 2) == make_imm(1, 2)
    assert make_imm((1 << 20) - 1, 4095) == 2**32 - 1
    with pytest.raises(ValueError, match="20 bits"):
        make_imm(1 << 20, 0)


def test_fires_once_at_the_expected_count():
    calls, counters = [], ImmediateCounters()
    imm = make_imm(1, 1)
    counters.arm(imm, 3, calls.append)
    assert counters.waiting == 1
    _count(counters, imm, imm)
    assert not calls and counters.received(imm) == 2
    _count(counters, imm, imm, imm)
    assert calls == [imm] and counters.waiting == 0
    assert counters.overflow == 2 and counters.received(imm) == 5
    assert counters.disarm(imm) == 5


def test_expecting_nothing_fires_in_arm():
    calls, counters = [], ImmediateCounters()
    counters.arm(make_imm(1, 1), 0, calls.append)
    assert calls == [make_imm(1, 1)] and counters.waiting == 0


def test_what_comes_before_arming_or_of_another_generation_is_late():
    counters = ImmediateCounters()
    _count(counters, make_imm(1, 1))
    counters.arm(make_imm(1, 2), 1, _never)
    _count(counters, make_imm(1, 1), make_imm(1, 3), make_imm(2, 2))
    assert counters.late == 4 and counters.received(make_imm(1, 2)) == 0
    with pytest.raises(KeyError, match="generation 1"):
        counters.received(make_imm(1, 1))


def test_a_slot_is_armed_once():
    counters = ImmediateCounters()
    counters.arm(make_imm(7, 1), 1, _never)
    with pytest.raises(ValueError, match="slot 7 is already armed, with generation 1"):
        counters.arm(make_imm(7, 2), 1, _never)
    counters.disarm(make_imm(7, 1))
    with pytest.raises(KeyError):
        counters.disarm(make_imm(7, 1))
    counters.arm(make_imm(7, 2), 1, _never)


def test_retarget():
    calls, counters = [], ImmediateCounters()
    imm = make_imm(1, 1)
    counters.arm(imm, 10, _never)
    _count(counters, imm, imm, imm)
    counters.retarget(imm, 4, calls.append)
    assert not calls
    _count(counters, imm)
    assert calls == [imm] and counters.waiting == 0
    counters.retarget(imm, 6, calls.append)
    assert counters.waiting == 1
    _count(counters, imm, imm)
    assert calls == [imm, imm]
    counters.retarget(imm, 2, calls.append)
    assert calls == [imm, imm, imm]
    with pytest.raises(KeyError):
        counters.retarget(make_imm(1, 2), 1, _never)


def test_waiting_is_announced():
    announced = []
    counters = ImmediateCounters(on_waiting=lambda: announced.append(counters.waiting))
    counters.arm(make_imm(1, 1), 1, _never)
    counters.arm(make_imm(2, 1), 0, lambda _: None)
    assert announced == [1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 11), max_size=40), max_size=8), st.integers(0, 20))
def test_counts_agree_with_counting_one_by_one(batches, expected):
    """Slots 0-2 in generations 0-3, of which generation 1 is armed."""
    calls, counters = [], ImmediateCounters()
    armed = [make_imm(slot, 1) for slot in range(3)]
    for imm in armed:
        counters.arm(imm, expected, calls.append)
    seen = Counter()
    for batch in batches:
        imms = [make_imm(code % 3, code // 3) for code in batch]
        seen.update(imms)
        _count(counters, *imms)
        for imm in armed:
            assert counters.received(imm) == seen[imm]
    assert sorted(calls) == sorted(imm for imm in armed if seen[imm] >= expected)
    assert counters.late == sum(count for imm, count in seen.items() if imm not in armed)
    assert counters.overflow == sum(max(0, seen[imm] - expected) for imm in armed)
