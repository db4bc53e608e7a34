"""The one thread that makes every libfabric call of a process: it drains, posts, closes, calls back and rests."""

from __future__ import annotations

from dataclasses import dataclass

from transport import worker
from transport.api import Memory, OnMessage
from transport.errors import TransportError
from transport.fabric import abi
from transport.fabric.lane import Lane
from transport.fabric.link_end import LinkEnd
from transport.fabric.pace import ALONE, SHORTEST_NS, SPIN, Pause, pause
from transport.fabric.posting import Loops
from transport.fabric.regions import FabricSource, Nic, register_source, release_source
from transport.fabric.rest import Rest, precise_sleep
from transport.imm import Imm, ImmediateCounters
from transport.inbox import attempted, guarded

_NOTHING = (-abi.FI_EAGAIN, 0)


@dataclass(frozen=True, slots=True)
class Setting:
    """How a worker behaves; see `TransferEngine`."""

    stall_timeout_s: float
    spin: bool | None = None


class Worker(worker.Worker[LinkEnd]):
    """Owns the NICs beside the links."""

    def __init__(self, nics: list[Nic], loops: Loops, counters: ImmediateCounters, setting: Setting) -> None:
        self._nics, self._loops = nics, loops
        self._profile = nics[0].domain.profile
        self._stall_timeout_s = setting.stall_timeout_s
        self._spin = self._profile.spins if setting.spin is None else setting.spin
        self._rest = Rest(loops, counters.watched)
        self._watched: list[tuple[LinkEnd, Lane]] = []
        self._sleep_ns = SHORTEST_NS
        super().__init__(self._profile.name, counters, self._rest)
        self._begin()

    def register(self, memory: Memory) -> FabricSource:
        """Raises FabricError if no NIC can register it."""
        source: FabricSource = self.inbox.call(lambda: register_source(self._nics, memory))
        return source

    def release(self, source: FabricSource) -> None:
        self.inbox.call(lambda: release_source(self._nics, source))

    def open_end(self, on_message: OnMessage | None) -> LinkEnd:
        end: LinkEnd = self.inbox.call(lambda: self._open_end(on_message))
        return end

    def _open_end(self, on_message: OnMessage | None) -> LinkEnd:
        self._check_going_on()
        end = LinkEnd(self._nics, self._loops, self.outbox, self._stall_timeout_s)
        end.talk.on_message = on_message
        self._ends.append(end)
        try:
            if not self._spin and not end.wakes:
                end.doorbell = self._rest.doorbell()
        except OSError as error:
            self._end(end)
            raise TransportError(f"a link needs a socket to be woken by, and got none: {error}") from error
        self._watch()
        return end

    def _expose(self, end: LinkEnd, memory: Memory) -> tuple[int, tuple[bytes, ...]]:
        self._take_kept()
        try:
            return end.expose(memory)
        finally:
            self._watch()  # a NIC that cannot register it is lost

    def _take_kept(self) -> None:
        for queue, context in self._rest.take_kept():
            self._watched[queue][1].take_own(context)

    def _end(self, end: LinkEnd, error: TransportError | None = None) -> None:
        self._take_kept()
        super()._end(end, error)

    def _watch(self) -> None:
        self._take_kept()
        self._watched = [(end, lane) for end in self._ends for lane in end.open_lanes]
        self._rest.watch([lane.poster for _, lane in self._watched])

    @staticmethod
    def _prepare() -> None:
        precise_sleep()

    def _step(self) -> bool:
        self._take_kept()
        moved = super()._step()
        if moved:
            self._sleep_ns = SHORTEST_NS
        return moved

    def _turn(self) -> bool:
        moved = False
        for end, lane in self._watched:
            if lane.closed:  # by what was done for another
                continue
            entries = lane.poster.peek()
            if entries in _NOTHING:
                lane.calm = True
                if not end.stirred:
                    continue
            elif self._parking.taken:
                lane.calm = True
            moved = self._pump(end, lane, entries if entries > 0 else 0) or moved
        return moved

    def _pump(self, end: LinkEnd, lane: Lane, entries: int = 0) -> bool:
        self._take_kept()  # of a lane that this may close
        try:
            moved = end.pump(lane, entries)
        except Exception as error:
            self._break(end, error)
            return True
        if lane.closed:
            self._watch()
        return moved

    def _pump_all(self, end: LinkEnd) -> None:
        for lane in end.open_lanes:
            self._pump(end, lane)

    def _wait(self) -> None:
        """Rests until there is something to do; what a queue had is taken at once."""
        # First, so that who begins to wait after `busy` is known wakes this thread.
        if not self.inbox.begin_rest():
            return
        queue, code, self._sleep_ns = self._rest(self._pause())
        self.inbox.end_rest()
        if queue >= 0 or len(self._rest.imms):
            self._sleep_ns = SHORTEST_NS
            self._take_rest(queue, code)

    def _look_for(self, imm: Imm, count: int) -> None:
        try:
            self._look(imm, count)
        except BaseException as error:  # what was read may be lost: see `_poll`
            self._fault = error
            raise

    def _look(self, imm: Imm, count: int) -> None:
        counters, outbox = self._counters, self.outbox
        self._take_kept()
        if outbox.imms or outbox.messages or outbox.finished or self._closing.ended:
            self._call_back()
            if counters.received(imm) >= count:
                return
        if self._closing.lingering or any(end.stirred for end in self._ends) or not self.inbox.begin_rest():
            self._poll()
            return
        counters.watched.set(imm, count - counters.received(imm))
        queue, code, _ = self._rest(SPIN, patient=True)
        self.inbox.end_rest()
        self._take_rest(queue, code)

    def _take_rest(self, queue: int, code: int) -> None:
        """The entries in the buffer first: a callback may have others read into it."""
        imms, self._rest.imms = self._rest.imms, []  # a callback may poll
        if queue >= 0:
            self._pump(*self._watched[queue], max(code, 0))
            self._call_back()
        for on_full, imm in self._counters.count(imms):
            guarded(on_full, imm)

    def _pause(self) -> Pause:
        if not self._ends:
            return ALONE
        if self._spin:
            return SPIN
        closing = bool(self._closing.lingering)
        # Within one host, whoever writes to what is armed rings.
        armed = self._counters.waiting > 0 and self._profile.reach != "host"
        busy = closing or armed or any(end.busy for end in self._ends)
        blocked = any(end.blocked for end in self._ends)
        return pause(self._sleep_ns, blocked=blocked, sure=self._rest.sure and not closing, busy=busy)

    def _release(self) -> None:
        for nic in self._nics:
            attempted(nic.domain.close, "closing a domain")
