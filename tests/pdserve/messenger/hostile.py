"""Real nodes over a hostile network: messages are lost, repeated, late and out of order, nodes are cut off, NICs and
links break, and nodes die. What must hold whatever happens is checked by `World.check`."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pdserve.config import HandoffSettings
from pdserve.messenger.wire import MeetRequest
from pdserve.types import FinishReason, GenerationRequest, Incarnation, NodeId
from tests.pdserve.engine.toy import eventually
from tests.pdserve.messenger.late import LateLoopback
from tests.pdserve.messenger.pair import PATIENCE_S, DecodeSide, Network, PrefillSide
from transport.errors import TransportError
from transport.faults import FaultPlan, FaultyTransport
from transport.loopback import LoopbackNet
from transport.loopback_link import LoopbackLink

HASTE = HandoffSettings(request_timeout_s=0.15, transfer_timeout_s=0.4, failover_timeout_s=0.3)
SLOTS = 6  # so few that generations go round quickly
WINDOW = 8  # so small that a handoff takes a while
FAULTS = FaultPlan(
    delay_s=(0.0, 0.015), reorder=True, piece_blocks=3, storm_every_s=0.1, storm_s=0.02, fail_share=0.003
)  # fmt: skip
PREFILL, DECODE = (NodeId("p0"), NodeId("p1")), (NodeId("d0"), NodeId("d1"))


class Adversary:
    """Decides about every control message, by a seed; and cuts pairs of nodes off from each other's messages."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._kept: list[Callable[[], None]] = []
        self.owner: dict[Incarnation, NodeId] = {}
        self.cut: set[frozenset[NodeId]] = set()
        self.idle = False

    def message(self, to: NodeId, message: Any, deliver: Callable[[Any], None]) -> None:
        self._decide(frozenset((self.owner[message.source], to)), lambda: deliver(message))

    def meeting(self, to: NodeId, request: MeetRequest, meet: Callable[[Any, Any], None], reply: Any) -> None:
        pair = frozenset((request.card.node_id, to))
        self._decide(pair, lambda: meet(request, lambda answer: self._decide(pair, lambda: reply(answer))))

    def _decide(self, pair: frozenset[NodeId], deliver: Callable[[], None]) -> None:
        with self._lock:
            fate = 1.0 if self.idle else self._random.random()
            if pair in self.cut or fate < 0.06:
                return
            if fate < 0.14:
                self._kept.append(deliver)
                return
        deliver()
        if fate < 0.22:
            deliver()

    def release(self) -> None:
        """What was kept arrives now, in any order."""
        with self._lock:
            kept, self._kept = self._kept, []
            self._random.shuffle(kept)
        for deliver in kept:
            deliver()

    def give_in(self) -> None:
        self.idle = True
        self.cut.clear()
        self.release()


class Faults(logging.Handler):
    """Errors that the code says are its own: an event that failed, a callback that raised, an engine that stopped."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.seen.append(f"{record.name}: {record.getMessage()} {error!r}")


@dataclass(eq=False)
class Asked:
    side: DecodeSide
    request: GenerationRequest


@dataclass
class World:
    seed: int
    nics: int
    revokes: bool = True  # else what is written may land after its receiver has closed the link: see `late.py`
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._names = itertools.count()
        self.adversary = Adversary(self.seed)
        self.faults = Faults()
        for name in ("pdserve", "transport"):
            logging.getLogger(name).addHandler(self.faults)
        net, plan = LoopbackNet(), replace(FAULTS, seed=self.seed)
        self.network = Network(
            lambda provider: FaultyTransport(LateLoopback(net, self.seed, self.nics, revokes=self.revokes), plan),
            handoff=HASTE,
            slots=SLOTS,
        )
        for name in PREFILL:
            self.start_prefill(name)
        for name in DECODE:
            self._start_decode(name)

    def _start_decode(self, name: NodeId) -> None:
        self._join(self.network.add_decode(name, window=WINDOW))

    def start_prefill(self, name: NodeId) -> None:
        """Or the next incarnation of one that was killed."""
        self._join(self.network.add_prefill(name, kv_cache_tokens=256))

    def _join(self, side: PrefillSide | DecodeSide) -> None:
        name, channel = side.node, self.network.channels[side.node]
        self.adversary.owner[side.card.incarnation] = name
        channel.tamper = partial(self.adversary.message, name)
        if isinstance(side, PrefillSide):
            meet = channel.meet_now
            channel.tamper_meeting = lambda request, reply: self.adversary.meeting(name, request, meet, reply)

    # ------------------------------------------------ what may happen

    def ask(self, decode: NodeId, prefill: NodeId, tokens: int, answer: int) -> None:
        side = self.network.decode[decode]
        name = f"r{next(self._names)}"
        self.asked.append(Asked(side, side.request(name, tokens, prefill, answer)))

    def cancel(self, which: int) -> None:
        asked = self.asked[which % len(self.asked)]
        asked.side.receiver.cancel(asked.request.request_id)

    def kill_prefill(self, name: NodeId) -> None:
        side = self.network.prefill[name]
        side.die()
        self.network.channels[name].tamper = None
        self.network.channels[name].mute()

    def kill_decode(self, name: NodeId, silent: bool) -> None:
        """Its successor starts at once. `silent`: the wire does not report it, as shared memory does not."""
        side = self.network.decode[name]
        self.network.channels[name].mute()
        for link in self._links(side) if silent else []:
            link.go_silent()
        side.close()
        self.asked = [asked for asked in self.asked if asked.side is not side]
        self._start_decode(name)

    def doubt(self, decode: NodeId, prefill: NodeId) -> None:
        """D revokes a P that works, and meets it again."""
        self.network.decode[decode].receiver.peer_lost(prefill, "it seemed so")

    def forget(self, decode: NodeId, prefill: NodeId) -> None:
        """P gives a D up that lives; D is not told."""
        self.network.prefill[prefill].sender.peer_lost(self.network.decode[decode].card.incarnation, "it seemed so")

    def break_link(self, name: NodeId) -> None:
        side = self.network.decode[name] if name in DECODE else self.network.prefill[name]
        for link in self._links(side)[:1]:
            with suppress(TransportError):
                link.break_down(TransportError("the completion queue has failed"))

    def silence_link(self, decode: NodeId) -> None:
        """Nothing lands or completes on it, and nobody is told."""
        for link in self._links(self.network.decode[decode])[:1]:
            link.go_silent()

    def lose_nic(self, name: NodeId) -> None:
        side: Any = self.network.decode[name] if name in DECODE else self.network.prefill[name]
        if self.nics > 1 and name not in self.network.down:
            with suppress(TransportError):
                side.transport.inner.fail_nic(self.nics - 1)

    @staticmethod
    def _links(side: PrefillSide | DecodeSide) -> list[LoopbackLink]:
        """Of the transport below, towards everybody whom the messenger has met or asked to."""
        if isinstance(side, DecodeSide):
            links: list[Any] = [peer.offered for peer in side.receiver._peers.all()]
        else:
            links = [peer.link for peer in list(side.sender._peers._met.values())]
        return [link.link._inner for link in links]

    # ------------------------------------------------ what must hold

    def check(self) -> None:
        """The adversary gives in; then everything ends, nothing is lost, and all works again."""
        for name in sorted(self.network.down):
            self.start_prefill(name)
        self.adversary.give_in()
        for asked in self.asked:
            asked.side.wait(asked.request)
        self.network.settle()
        for asked in self.asked:
            self._check_answer(asked)
        for side in self.network.decode.values():
            counters = side.transport.immediates
            # A late immediate would be a write of a handoff that was given back while its link stood.
            assert counters.late == counters.overflow == 0 and not counters.waiting  # type: ignore[attr-defined]
            assert side.receiver.unreadable == 0
            self._serve(side)
        self.network.settle()
        for each in self._all():
            eventually(lambda each=each: each.transport.stats()["links_open"] == len(self._links(each)))  # type: ignore[misc]
        assert not self.faults.seen

    def _check_answer(self, asked: Asked) -> None:
        """Right, or an error that says why, or cancelled; a right one has counted every write."""
        output = asked.side.ended[asked.request.request_id]
        if output.finish is FinishReason.ERROR:
            assert output.error and not asked.side.tokens.get(asked.request.request_id)
        elif output.finish is not FinishReason.ABORT:
            asked.side.check(asked.request)
            trace = asked.side.receiver.trace(asked.request.request_id)
            if trace is not None:
                assert trace.writes_counted == trace.writes_expected
                assert trace.writes_posted in (None, trace.writes_expected)

    def _serve(self, side: DecodeSide) -> None:
        """Patience is short here, and the machine may be busy: it need not be the first request."""
        end_s = time.monotonic() + PATIENCE_S
        for turn in range(1000):
            request = side.request(f"after-{turn}", 40, PREFILL[turn % 2])
            side.wait(request)
            if side.ended[request.request_id].finish is FinishReason.LENGTH:
                side.check(request)
                return
            assert time.monotonic() < end_s, side.ended[request.request_id].error

    def _all(self) -> list[PrefillSide | DecodeSide]:
        return [*self.network.decode.values(), *self.network.prefill.values()]

    def close(self) -> None:
        for name in ("pdserve", "transport"):
            logging.getLogger(name).removeHandler(self.faults)
        self.adversary.idle = True
        if not self.revokes:  # nobody may write any more when the decode nodes' memory goes
            for side in self.network.prefill.values():
                side.close()
        self.network.close()
