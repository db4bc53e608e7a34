"""The smallest ping-pong that Python can make over libfabric: two foreign calls, made by ctypes, and nothing else."""

from __future__ import annotations

import ctypes as c

import numpy as np

from pdserve.bench.transport.sides.raw import IMM, RawSide
from pdserve.bench.transport.sides.side import PING_BYTES, PONG_BYTES, now_us
from transport.fabric import abi

_READ = c.CFUNCTYPE(c.c_ssize_t, c.c_void_p, c.c_void_p, c.c_size_t)
_ENTRIES = 8
_CONTEXTS = 64


class RawCtypesSide(RawSide):
    def ping(self, mode: str, count: int) -> list[float]:
        trips = []
        for number in range(count):
            begun = now_us()
            self._write(PING_BYTES, number)
            self._await_write()
            trips.append(now_us() - begun)
        return trips

    def pong(self, mode: str, count: int) -> None:
        for number in range(count):
            self._await_write()
            self._write(PONG_BYTES, number)
        while self._unsent:
            self._arrived += self._poll()

    def start(self) -> dict[str, object]:
        told = super().start()
        self._entries = np.zeros(_ENTRIES * abi.CQ_ENTRY_WORDS, np.int64)
        self._buffer = int(self._entries.ctypes.data)
        self._read, self._post = _READ(self.endpoint.cq_read), abi.WRITEDATA(self.endpoint.writedata)
        self._contexts = np.zeros(_CONTEXTS * abi.CONTEXT_BYTES, np.uint8)
        self._unsent = self._arrived = 0
        return told

    def _write(self, length_bytes: int, number: int) -> None:
        ping = length_bytes == PING_BYTES
        source, desc = (self.address, self.desc) if ping else (self.mail_address, self.mail_desc)
        target, key = (self.target, self.key) if ping else (self.mail_target, self.mail_key)
        context = int(self._contexts.ctypes.data) + abi.CONTEXT_BYTES * (number % _CONTEXTS)
        self._unsent += 1
        post, ep = self._post, self.endpoint.ep
        while code := post(ep, source, length_bytes, desc, IMM, self.dest, target, key, context):
            self._check("fi_writedata", code)
            self._arrived += self._poll()

    def _await_write(self) -> None:
        while not self._arrived:
            self._arrived += self._poll()
        self._arrived -= 1

    def _poll(self) -> int:
        """Writes of the peer that have come."""
        count = self._read(self.endpoint.cq, self._buffer, _ENTRIES)
        if count == -abi.FI_EAGAIN:
            return 0
        self._check("fi_cq_read", min(count, 0))
        flags = self._entries[1 : 1 + count * abi.CQ_ENTRY_WORDS : abi.CQ_ENTRY_WORDS]
        remote = sum(bool(flag & abi.FI_REMOTE_WRITE) for flag in flags.tolist())
        self._unsent -= count - remote
        return remote
