"""The one thread that makes every UCX call of a transport: it polls, posts, closes, calls back and rests."""

from __future__ import annotations

from transport import worker
from transport.api import Memory, OnMessage
from transport.imm import ImmediateCounters
from transport.transfer import retire
from transport.ucx.binding import Loops
from transport.ucx.context import Context, Region
from transport.ucx.link_end import LinkEnd, UcxSource
from transport.ucx.posting import Rest, precise_sleep

_SPINS = 40
_BUSY_NS = 5_000_000
"""Longest sleep while something is under way: UCX's descriptors wake it, this only bounds a lost wake-up."""
_ARMED_NS = 25_000_000
"""The same while it only waits for what a peer writes, which may be long: each end of a sleep costs some 50 µs."""
_BLOCKED_NS = 50_000_000
_IDLE_NS = 1_000_000_000


class Worker(worker.Worker[LinkEnd]):
    """Owns the context beside the links."""

    def __init__(self, context: Context, loops: Loops, counters: ImmediateCounters, stall_timeout_s: float) -> None:
        self._context, self._loops, self._stall_timeout_s = context, loops, stall_timeout_s
        self._rest = Rest(loops, context.table)
        super().__init__("ucx", counters, self._rest)
        self._begin()

    def register(self, memory: Memory) -> Region:
        """Raises FabricError, ProviderUnavailable."""
        region: Region = self.inbox.call(lambda: self._context.register_source(memory))
        return region

    def release(self, source: UcxSource) -> None:
        """Raises RegionBusy while something reads from it."""
        self.inbox.call(lambda: self._release_source(source))

    def _release_source(self, source: UcxSource) -> None:
        retire(source)
        self._context.release(source.region)

    def open_end(self, on_message: OnMessage | None) -> LinkEnd:
        end: LinkEnd = self.inbox.call(lambda: self._open_end(on_message))
        return end

    def _open_end(self, on_message: OnMessage | None) -> LinkEnd:
        self._check_going_on()
        end = LinkEnd(self._context, self._loops, self.outbox, self._stall_timeout_s)
        end.on_message = on_message
        self._ends.append(end)
        self._watch()
        return end

    def _watch(self) -> None:
        self._rest.watch([(end.channel.worker, end.channel.event_fd) for end in self._ends])

    @staticmethod
    def _prepare() -> None:
        precise_sleep()

    def _turn(self) -> bool:
        moved = False
        for end in tuple(self._ends):
            moved = self._pump_all(end) or moved
        return moved

    def _pump_all(self, end: LinkEnd) -> bool:
        try:
            return end.pump()
        except Exception as error:
            self._break(end, error)
            return True

    def _wait(self) -> None:
        """Rests until there is something to do."""
        # First, so that who begins to wait after `busy` is known wakes this thread.
        if not self.inbox.begin_rest():
            return
        busy, armed = bool(self._closing.lingering) or any(end.busy for end in self._ends), self._counters.waiting > 0
        longest_ns = _BUSY_NS if busy else _ARMED_NS if armed else _IDLE_NS
        if any(end.blocked for end in self._ends):
            longest_ns = _BLOCKED_NS
        self._rest(_SPINS if busy or armed else 0, longest_ns)
        self.inbox.end_rest()

    def _release(self) -> None:
        self._context.close()
