"""Two-sided messages over a fabric that may lose a NIC: fragments, credits and order, without any IO.

A message is cut into fragments that fit a receive buffer. Each has a number; the receiver takes them in order and
tells how many it has taken, in every fragment that it sends itself or, when half of the credits are used up, in one
that carries nothing else. So no more than `credits` fragments are ever under way, and as many receive buffers (and
`EXTRA_BUFFERS` for what carries only an acknowledgement) are enough: nothing relies on a provider's overrun protection.
When a NIC dies, what was not acknowledged goes out again elsewhere, and its last fragment asks for an acknowledgement:
the peer may have taken all of it before. What comes twice is dropped. Only then may more be under way to a NIC that is
left than it has buffers for: what it had taken, and the same again. A reliable provider holds that back.
"""

from __future__ import annotations

import struct
import threading
from collections import deque

from transport.api import MAX_MESSAGE_BYTES
from transport.errors import BacklogFull, MessageTooLarge

FRAGMENT_BYTES = 4096
"""Length of a receive buffer."""
CREDITS = 32
EXTRA_BUFFERS = 4
BUFFERS = CREDITS + EXTRA_BUFFERS
MAX_BACKLOG_BYTES = 4 * MAX_MESSAGE_BYTES

_HEADER = struct.Struct("<QQBxxxI")
"""number, acknowledged, kind, payload length."""
_PAYLOAD_BYTES = FRAGMENT_BYTES - _HEADER.size
_MORE, _LAST, _ACK = 0, 1, 2
_ASKS = 0x80
"""In the kind of a fragment that wants to be acknowledged at once."""
_LOST = 0x40
"""In the kind of a fragment whose sender has lost a NIC, on which something may have been coming in: repeat it."""
_FLAGS = _ASKS | _LOST


class MessageFlow:
    """One link's messages, both ways. Used by the worker alone, except `check`."""

    def __init__(self, credits: int = CREDITS) -> None:
        assert credits > 1
        self._credits = credits
        self._lock = threading.Lock()
        self._queue: deque[tuple[int, bytes]] = deque()  # (kind, payload) not sent yet
        self._backlog_bytes = 0
        self._next_number = 0
        self._unacknowledged: deque[tuple[int, int, bytes]] = deque()
        self._again: deque[tuple[int, int, bytes]] = deque()
        self._expected = 0
        self._told = 0
        self._tell_now = False
        self._lost = False
        self._early: dict[int, tuple[int, bytes]] = {}
        self._parts: list[bytes] = []
        self.sent = 0
        self.received = 0

    def check(self, message: bytes) -> None:
        """Makes room for a message that is about to be submitted. Raises MessageTooLarge, BacklogFull. From any thread.

        What waits is counted here, not in `submit`: a caller may be far ahead of the worker.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise MessageTooLarge(f"a message of {len(message)} bytes is above {MAX_MESSAGE_BYTES}: use a write")
        with self._lock:
            if self._backlog_bytes + len(message) > MAX_BACKLOG_BYTES:
                raise BacklogFull(f"{self._backlog_bytes} bytes of messages wait for a peer that takes none")
            self._backlog_bytes += _carried_bytes(len(message))

    def submit(self, message: bytes) -> None:
        pieces = [message[at : at + _PAYLOAD_BYTES] for at in range(0, len(message), _PAYLOAD_BYTES)] or [b""]
        self._queue.extend((_MORE, piece) for piece in pieces[:-1])
        self._queue.append((_LAST, pieces[-1]))
        self.sent += 1

    @property
    def wants_to_send(self) -> bool:
        may = len(self._unacknowledged) < self._credits
        return bool(self._again) or (bool(self._queue) and may) or self._must_tell

    def next(self) -> bytes | None:
        """The fragment to send now, at most FRAGMENT_BYTES long; None if there is none or no credit for it."""
        if self._again:
            number, kind, payload = self._again.popleft()
            if not self._again:
                kind |= _ASKS
        elif self._queue and len(self._unacknowledged) < self._credits:
            kind, payload = self._queue.popleft()
            number = self._next_number
            self._next_number += 1
            self._unacknowledged.append((number, kind, payload))
        elif self._must_tell:
            number, kind, payload = 0, _ACK, b""
        else:
            return None
        if self._lost:
            kind |= _LOST
        self._told, self._tell_now, self._lost = self._expected, False, False
        return _HEADER.pack(number, self._expected, kind, len(payload)) + payload

    def arrived(self, fragment: bytes) -> list[bytes]:
        """Takes a fragment; returns the messages that are complete with it, in order. Raises ValueError if damaged."""
        number, acknowledged, kind, payload = self._unpacked(fragment)
        self._acknowledge(acknowledged)
        if kind & _LOST:
            self._again = deque(self._unacknowledged)
        if kind & _ASKS:
            self._tell_now = True
        kind &= ~_FLAGS
        if kind == _ACK or number < self._expected or number in self._early:
            return []
        self._early[number] = (kind, payload)
        messages = []
        while self._expected in self._early:
            kind, payload = self._early.pop(self._expected)
            self._expected += 1
            self._parts.append(payload)
            if kind == _LAST:
                messages.append(b"".join(self._parts))
                self._parts = []
        self.received += len(messages)
        return messages

    def repeat(self) -> None:
        """A NIC has died: what the peer has not acknowledged goes out again, and the peer is asked to do the same."""
        self._again = deque(self._unacknowledged)
        self._tell_now = self._lost = True

    @property
    def _must_tell(self) -> bool:
        return self._tell_now or self._expected - self._told >= self._credits // 2

    def _acknowledge(self, taken: int) -> None:
        freed = 0
        while self._unacknowledged and self._unacknowledged[0][0] < taken:
            freed += _HEADER.size + len(self._unacknowledged.popleft()[2])
        if freed:
            with self._lock:
                self._backlog_bytes -= freed
        while self._again and self._again[0][0] < taken:
            self._again.popleft()

    def _unpacked(self, fragment: bytes) -> tuple[int, int, int, bytes]:
        if len(fragment) < _HEADER.size:
            raise ValueError(f"a message fragment of {len(fragment)} bytes is too short")
        number, acknowledged, kind, length = _HEADER.unpack_from(fragment)
        payload = bytes(fragment[_HEADER.size : _HEADER.size + length])
        ahead = number - self._expected
        if kind & ~_FLAGS not in (_MORE, _LAST, _ACK) or len(payload) != length or acknowledged > self._next_number:
            raise ValueError("a message fragment is damaged, or comes from another protocol")
        if kind != _ACK and ahead >= self._credits:
            raise ValueError(f"fragment {number} is {ahead} ahead: the peer has sent beyond its credits")
        return number, acknowledged, kind, payload


def _carried_bytes(length: int) -> int:
    """Bytes of all fragments of a message: an empty one waits, too."""
    return length + _HEADER.size * max(1, -(-length // _PAYLOAD_BYTES))
