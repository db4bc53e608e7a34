"""Immediate slots and their generations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.messenger.slots import SlotTable
from transport.api import GENERATION_BITS, split_imm


def test_a_slot_returns_with_its_next_generation() -> None:
    table = SlotTable(1)
    first = table.take()
    table.give_back(first)
    assert [split_imm(first), split_imm(table.take())] == [(0, 1), (0, 2)]


def test_slots_go_round_so_that_a_generation_returns_late() -> None:
    table = SlotTable(4)
    seen = []
    for _ in range(8):
        imm = table.take()
        seen.append(split_imm(imm)[0])
        table.give_back(imm)
    assert seen == [0, 1, 2, 3] * 2


def test_generations_wrap_within_their_bits() -> None:
    table = SlotTable(1)
    for _ in range((1 << GENERATION_BITS) + 3):
        imm = table.take()
        table.give_back(imm)
    assert split_imm(imm) == (0, 3)


def test_none_is_given_out_twice_nor_given_back_twice() -> None:
    table = SlotTable(2)
    imm = table.take()
    table.take()
    with pytest.raises(IndexError):
        table.take()
    table.give_back(imm)
    with pytest.raises(AssertionError):
        table.give_back(imm)


@given(st.lists(st.booleans(), max_size=60))
def test_what_is_out_is_never_taken(takes: list[bool]) -> None:
    table, out = SlotTable(5), []
    for take in takes:
        if take and table.free:
            out.append(table.take())
            assert len({split_imm(imm)[0] for imm in out}) == len(out) == 5 - table.free
        elif out:
            table.give_back(out.pop(0))
