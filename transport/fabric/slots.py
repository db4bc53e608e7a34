"""The operations that one lane has under way, and the memory that their contexts point to."""

from __future__ import annotations

import numpy as np

from transport.fabric import abi


class Slots:
    """At most `writes` outstanding writes, and `messages` slots for sends and receives; see `loops`.

    `contexts` is where their memory starts, `total` how many there are.
    """

    def __init__(self, writes: int, messages: int = 0) -> None:
        self.total = writes + messages
        self._memory = np.zeros(self.total * abi.CONTEXT_BYTES, np.uint8)
        self.contexts = int(self._memory.ctypes.data)
        self.owner = np.zeros(writes, np.int64)
        self.free = np.arange(writes, dtype=np.int64)[::-1].copy()
        self.top = np.array([writes], np.int64)
        self.writes = writes
        # The same memory: Python reads and writes single numbers of it in a third of the time.
        self._owner, self._free, self._top = self.owner.data, self.free.data, self.top.data

    @property
    def available(self) -> int:
        """Writes that may be posted now."""
        return int(self._top[0])

    @property
    def taken(self) -> int:
        """Writes that are outstanding."""
        return self.writes - int(self._top[0])

    def message_context(self, slot: int) -> int:
        return self.contexts + abi.CONTEXT_BYTES * (self.writes + slot)

    def release(self, context: int) -> int | None:
        """Frees the slot of a write; returns its ticket, None if the context is not that of one under way."""
        slot = self._slot(context)
        if slot is None or slot >= self.writes:
            return None
        ticket = self._owner[slot]
        if not ticket:
            return None
        self._owner[slot] = 0
        self._free[self._top[0]] = slot
        self._top[0] += 1
        return ticket

    def message_slot(self, context: int) -> int | None:
        """None if the context is not that of a message."""
        slot = self._slot(context)
        return None if slot is None or slot < self.writes else slot - self.writes

    def _slot(self, context: int) -> int | None:
        slot, rest = divmod(context - self.contexts, abi.CONTEXT_BYTES)
        return None if rest or not 0 <= slot < self.total else slot
