"""The buffers of one lane for two-sided messages: fragments go out from some and come into the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from transport.descriptors import Memory
from transport.fabric import abi, calls
from transport.fabric.domain import Domain
from transport.fabric.endpoint import Endpoint
from transport.fabric.slots import Slots
from transport.messages import BUFFERS, FRAGMENT_BYTES
from transport.outgoing import Path

MESSAGE_SLOTS = 2 * BUFFERS
"""Slots `:BUFFERS` are sends, those from there on receives."""


class Mailbox:
    """Every lane has all its receive buffers posted: the peer may turn to any, with all its credits, when a NIC dies.

    They cost no memory until something comes: pages that were never touched are not backed.
    Raises FabricError.
    """

    def __init__(self, domain: Domain, endpoint: Endpoint, slots: Slots) -> None:
        self._domain, self._endpoint, self._slots = domain, endpoint, slots
        self._memory = np.empty((MESSAGE_SLOTS, FRAGMENT_BYTES), np.uint8)
        self.address = int(self._memory.ctypes.data)
        """Where the buffers start; `desc` is their local descriptor."""
        self._region = domain.register_buffers(Memory(self.address, self._memory.nbytes))
        self.desc: int = self._region.desc
        self._send = abi.SEND(calls.send_address(endpoint.ep))
        self._recv = abi.RECV(calls.recv_address(endpoint.ep))
        self._free = list(range(BUFFERS))
        self.unposted = list(range(BUFFERS, MESSAGE_SLOTS))
        self._paths: dict[int, Path] = {}

    @property
    def full(self) -> bool:
        """All send buffers are under way."""
        return not self._free

    @property
    def sending(self) -> bool:
        return bool(self._paths)

    def receive(self) -> int:
        """Posts the receive buffers that are not; 0, or the code of the call that ended it (-EAGAIN: try later)."""
        while self.unposted:
            slot = self.unposted[-1]
            code = int(self._recv(*self._arguments(slot, FRAGMENT_BYTES, abi.FI_ADDR_UNSPEC)))
            if code:
                return code
            self.unposted.pop()
        return 0

    def send(self, fragment: bytes, dest: int, path: Path) -> int:
        """Sends from a free buffer; 0, or the code of the call (-EAGAIN: try later)."""
        slot = self._free[-1]
        self._memory[slot, : len(fragment)] = np.frombuffer(fragment, np.uint8)
        code = int(self._send(*self._arguments(slot, len(fragment), dest)))
        if not code:
            self._paths[self._free.pop()] = path
        return code

    def settle(self, events: NDArray[np.int64]) -> list[bytes]:
        """Takes completed slots and their lengths; returns the fragments that have come."""
        fragments = []
        for slot, length in events.tolist():
            if slot < BUFFERS:
                self.sent(slot)
            else:
                fragments.append(self._memory[slot, :length].tobytes())
                self.unposted.append(slot)
        return fragments

    def sent(self, slot: int) -> Path:
        """A send has ended, well or not; returns the path that it went by."""
        self._free.append(slot)
        return self._paths.pop(slot)

    def missed(self, slot: int) -> None:
        """A receive has failed: its buffer is free again."""
        self.unposted.append(slot)

    def close(self) -> None:
        """After the endpoint. Idempotent."""
        self._domain.release(self._region)

    def _arguments(self, slot: int, length: int, address: int) -> tuple[int, int, int, int, int, int]:
        buffer = int(self._memory.ctypes.data) + slot * FRAGMENT_BYTES
        return self._endpoint.ep, buffer, length, self._region.desc, address, self._slots.message_context(slot)
