"""Handoff messages as bytes, for links between hosts: versioned, without pickle, quick for long prompts.

A message is `"PD"`, the protocol version, its kind, the handoff's id and its sender's incarnation; what follows is the
kind's own. Little-endian; texts are UTF-8, texts and arrays go by their length. A prompt of 128 Ki tokens takes 2 ms
either way. `Done` has at most `LAYER_ROWS` rows of layers and as many chunks, which makes 208 KiB, whatever the number
of ranks and tokens. Meetings are not here: they go by discovery's channel, and compare versions before any of this is
sent.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

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
    ToDecode,
    ToPrefill,
)
from pdserve.types import Incarnation, NodeId, PageIndex
from transport.api import Imm

Message = ToPrefill | ToDecode

_MAGIC = b"PD"
_PREFIX = struct.Struct("<2sBB")
_COMMON = struct.Struct("<QQQ")  # id.decode, id.number, source
_LENGTH = struct.Struct("<I")
_LAYER = struct.Struct("<IIdddIQ")


class Unreadable(ValueError):
    """Bytes that are no message of this protocol version; says why."""


def encode(message: Message) -> bytes:
    """Raises struct.error if a number does not fit its field."""
    kind, write, _ = _BY_TYPE[type(message)]
    parts = [_PREFIX.pack(_MAGIC, PROTOCOL_VERSION, kind), _COMMON.pack(*message.id, message.source)]
    write(message, parts)
    return b"".join(parts)


def decode(data: bytes) -> Message:
    """Raises Unreadable."""
    if len(data) < _PREFIX.size or not data.startswith(_MAGIC):
        raise Unreadable(f"these {len(data)} bytes are no message")
    _, version, kind = _PREFIX.unpack_from(data)
    if version != PROTOCOL_VERSION:
        raise Unreadable(f"the message has version {version}, this side speaks {PROTOCOL_VERSION}")
    if kind not in _BY_KIND:
        raise Unreadable(f"there is no message of kind {kind} in version {version}")
    reader = _Reader(data, _PREFIX.size)
    try:
        decode_incarnation, number, source = reader.take(_COMMON)
        message = _BY_KIND[kind](reader, HandoffId(Incarnation(decode_incarnation), number), Incarnation(source))
    except (struct.error, UnicodeDecodeError) as error:
        raise Unreadable(f"a message of kind {kind} and {len(data)} bytes is damaged: {error}") from error
    if reader.left:
        raise Unreadable(f"a message of kind {kind} has {reader.left} bytes too many")
    return message


class _Reader:
    """Takes one thing after another. What reaches beyond the end raises struct.error."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, form: struct.Struct) -> tuple[Any, ...]:
        values = form.unpack_from(self._data, self._at)
        self._at += form.size
        return values

    def bytes(self, length: int) -> bytes:
        if length > self.left:
            raise struct.error(f"{length} bytes are announced, {self.left} are there")
        self._at += length
        return self._data[self._at - length : self._at]

    def text(self) -> str:
        return self.bytes(*self.take(_LENGTH)).decode()

    def ints(self) -> tuple[int, ...]:
        (count,) = self.take(_LENGTH)
        return struct.unpack(f"<{count}i", self.bytes(4 * count))


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _LENGTH.pack(len(encoded)) + encoded


def _ints(values: Sequence[int]) -> bytes:
    return struct.pack(f"<I{len(values)}i", len(values), *values)


# ------------------------------------------------ each kind: what it writes after the common part, and how that is read

_REQUEST = struct.Struct("<QIId")
_TARGET = struct.Struct("<Q")
_FLAG = struct.Struct("<?")
_TIMES = struct.Struct("<4d")


def _write_request(m: HandoffRequest, to: list[bytes]) -> None:
    to += [_text(m.sender), _REQUEST.pack(m.target, m.present_pages, m.imm, m.timeout_s), _ints(m.prompt)]
    to.append(_ints(m.pages))


def _read_request(r: _Reader, handoff: HandoffId, source: Incarnation) -> HandoffRequest:
    sender = NodeId(r.text())
    target, present_pages, imm, timeout_s = r.take(_REQUEST)
    prompt, pages = r.ints(), tuple(PageIndex(page) for page in r.ints())
    return HandoffRequest(
        handoff, sender, source, Incarnation(target), prompt, present_pages, pages, Imm(imm), timeout_s
    )


def _write_cancel(m: Cancel, to: list[bytes]) -> None:
    to += [_text(m.sender), _TARGET.pack(m.target)]


def _read_cancel(r: _Reader, handoff: HandoffId, source: Incarnation) -> Cancel:
    return Cancel(handoff, NodeId(r.text()), source, Incarnation(*r.take(_TARGET)))


def _write_accept(m: Accept, to: list[bytes]) -> None:
    to.append(_LENGTH.pack(m.queue_position))


def _read_accept(r: _Reader, handoff: HandoffId, source: Incarnation) -> Accept:
    return Accept(handoff, source, *r.take(_LENGTH))


def _write_reject(m: Reject, to: list[bytes]) -> None:
    to += [_text(m.reason), _FLAG.pack(m.retryable)]


def _read_reject(r: _Reader, handoff: HandoffId, source: Incarnation) -> Reject:
    return Reject(handoff, source, r.text(), *r.take(_FLAG))


def _write_quiesced(m: Quiesced, to: list[bytes]) -> None:
    to += [_LENGTH.pack(m.posted), _text(m.reason)]


def _read_quiesced(r: _Reader, handoff: HandoffId, source: Incarnation) -> Quiesced:
    (posted,) = r.take(_LENGTH)
    return Quiesced(handoff, source, posted, r.text())


def _write_not_met(m: NotMet, to: list[bytes]) -> None:
    to += [_TARGET.pack(m.target), _text(m.reason)]


def _read_not_met(r: _Reader, handoff: HandoffId, source: Incarnation) -> NotMet:
    return NotMet(handoff, source, Incarnation(*r.take(_TARGET)), r.text())


def _write_done(m: Done, to: list[bytes]) -> None:
    to += [_LENGTH.pack(m.posted), _FLAG.pack(m.timings is not None)]
    t = m.timings
    if t is None:
        return
    to += [_TIMES.pack(t.received_at, t.started_at, t.computed_at, t.drained_at), _ints([*chain(*t.chunks)])]
    to.append(_LENGTH.pack(len(t.layers)))
    to += [
        _LAYER.pack(w.chunk, w.layer, w.computed_at, w.posted_at, w.completed_at, w.writes, w.bytes) for w in t.layers
    ]


def _read_done(r: _Reader, handoff: HandoffId, source: Incarnation) -> Done:
    (posted,), (timed,) = r.take(_LENGTH), r.take(_FLAG)
    if not timed:
        return Done(handoff, source, posted, None)
    (received, started, computed, drained), borders = r.take(_TIMES), r.ints()
    if len(borders) % 2:
        raise struct.error("a token range has no end")
    (layers,) = r.take(_LENGTH)
    if max(layers, len(borders) // 2) > LAYER_ROWS:
        raise struct.error(f"{layers} rows of layers and {len(borders) // 2} chunks are more than {LAYER_ROWS}")
    packed = r.bytes(layers * _LAYER.size)
    chunks = tuple(zip(borders[::2], borders[1::2], strict=True))
    each = tuple(LayerTiming(*fields) for fields in _LAYER.iter_unpack(packed))
    return Done(handoff, source, posted, PrefillTimings(received, started, computed, drained, chunks, each))


_Write = Callable[[Any, list[bytes]], None]
_Read = Callable[[_Reader, HandoffId, Incarnation], Message]
_KINDS: tuple[tuple[type[Message], _Write, _Read], ...] = (
    (HandoffRequest, _write_request, _read_request),
    (Cancel, _write_cancel, _read_cancel),
    (Accept, _write_accept, _read_accept),
    (Reject, _write_reject, _read_reject),
    (Quiesced, _write_quiesced, _read_quiesced),
    (Done, _write_done, _read_done),
    (NotMet, _write_not_met, _read_not_met),
)
_BY_TYPE = {kind: (number, write, read) for number, (kind, write, read) in enumerate(_KINDS, start=1)}
_BY_KIND = {number: read for number, _, read in _BY_TYPE.values()}
