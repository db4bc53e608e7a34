"""Messages as bytes: what was sent is what arrives, and anything else is refused by name."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.messenger.codec import Message, Unreadable, decode, encode
from pdserve.messenger.wire import (
    LAYER_ROWS,
    PROTOCOL_VERSION,
    Accept,
    Cancel,
    Done,
    HandoffId,
    HandoffRequest,
    LayerTiming,
    NotMet,
    PrefillTimings,
    Quiesced,
    Reject,
)
from pdserve.types import Incarnation, NodeId, PageIndex
from transport.api import Imm

u64, u32 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
times, texts = st.floats(allow_nan=False), st.text(max_size=20)
incarnations = u64.map(Incarnation)
ids = st.builds(HandoffId, incarnations, u64)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple)
layers = st.builds(LayerTiming, u32, u32, times, times, times, u32, u64)
timings = st.builds(
    PrefillTimings,
    *[times] * 4,
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3).map(tuple),
    st.lists(layers, max_size=3).map(tuple),
)
nodes = texts.map(NodeId)
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        HandoffRequest, ids, nodes, incarnations, incarnations, tokens, u32,
        st.lists(st.integers(0, 2**31 - 1).map(PageIndex), max_size=9).map(tuple), u32.map(Imm), times,
    ),
    st.builds(Cancel, ids, nodes, incarnations, incarnations),
    st.builds(Accept, ids, incarnations, u32),
    st.builds(Reject, ids, incarnations, texts, st.booleans()),
    st.builds(Quiesced, ids, incarnations, u32, texts),
    st.builds(Done, ids, incarnations, u32, st.none() | timings),
    st.builds(NotMet, ids, incarnations, incarnations, texts),
)  # fmt: skip
CANCEL = Cancel(HandoffId(Incarnation(1), 2), NodeId("d0"), Incarnation(3), Incarnation(4))


@given(MESSAGES)
def test_what_was_sent_is_what_arrives(message: Message) -> None:
    assert decode(encode(message)) == message


@given(MESSAGES, st.data())
def test_a_message_that_is_cut_or_longer_is_refused(message: Message, data: st.DataObject) -> None:
    whole = encode(message)
    with pytest.raises(Unreadable):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(Unreadable):
        decode(whole + b"\0")


@given(MESSAGES, st.integers(0), st.integers(0, 255))
def test_a_damaged_message_is_read_or_refused_and_nothing_else(message: Message, at: int, byte: int) -> None:
    damaged = bytearray(encode(message))
    damaged[at % len(damaged)] = byte
    try:
        decode(bytes(damaged))
    except Unreadable as error:
        assert str(error)


@given(st.binary(max_size=100))
def test_any_bytes_are_no_message(junk: bytes) -> None:
    with pytest.raises(Unreadable, match="no message"):
        decode(b"x" + junk)


def test_another_version_is_named_with_ours() -> None:
    other = bytearray(encode(CANCEL))
    other[2] = PROTOCOL_VERSION + 1
    with pytest.raises(Unreadable, match=f"version {PROTOCOL_VERSION + 1}, this side speaks {PROTOCOL_VERSION}"):
        decode(bytes(other))


def test_an_unknown_kind_is_named() -> None:
    other = bytearray(encode(CANCEL))
    other[3] = 99
    with pytest.raises(Unreadable, match="no message of kind 99"):
        decode(bytes(other))


def test_a_length_beyond_the_end_takes_no_memory() -> None:
    request = HandoffRequest(
        CANCEL.id, NodeId("d0"), Incarnation(3), Incarnation(4), (1, 2), 0, (), Imm(5), timeout_s=1.0
    )
    damaged = bytearray(encode(request))
    start = len(damaged) - 4 - 8 - 4  # where the prompt's length stands
    damaged[start : start + 4] = struct.pack("<I", 2**32 - 1)
    with pytest.raises(Unreadable, match="announced"):
        decode(bytes(damaged))


def test_more_layers_than_are_ever_told_are_refused() -> None:
    """The bound is `condensed`'s: what is beyond it was not made by this version."""
    row = LayerTiming(0, 0, 1.0, 2.0, 3.0, 4, 5)
    whole = PrefillTimings(1.0, 2.0, 3.0, 4.0, ((0, 8),) * LAYER_ROWS, (row,) * LAYER_ROWS)
    done = Done(CANCEL.id, Incarnation(3), 4, whole)
    assert decode(encode(done)) == done and len(encode(done)) < 209 << 10
    for beyond in (replace(whole, layers=(row,) * (LAYER_ROWS + 1)), replace(whole, chunks=((0, 8),) * 5000)):
        with pytest.raises(Unreadable, match="more than 4096"):
            decode(encode(replace(done, timings=beyond)))


def test_a_prompt_of_131072_tokens() -> None:
    prompt = tuple(range(131_072))
    pages = tuple(map(PageIndex, range(4_096)))
    request = HandoffRequest(CANCEL.id, NodeId("d0"), Incarnation(3), Incarnation(4), prompt, 0, pages, Imm(5), 1.0)
    assert decode(encode(request)) == request


def test_a_number_that_does_not_fit_is_our_own_fault() -> None:
    with pytest.raises(struct.error):
        encode(Accept(CANCEL.id, Incarnation(3), -1))
