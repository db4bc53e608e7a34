"""The two state machines: what they answer on each path, and that no order of events breaks their promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from pdserve.messenger.handoff import decode as d
from pdserve.messenger.handoff import prefill as p
from tests.pdserve.messenger.handoff_world import PAGES_EACH, World


def decode_after(*events: d.DecodeEvent) -> d.DecodeHandoff:
    machine = d.DecodeHandoff()
    for event in events:
        machine.handle(event)
    return machine


def prefill_after(*events: p.PrefillEvent) -> p.PrefillHandoff:
    machine = p.PrefillHandoff()
    for event in events:
        machine.handle(event)
    return machine


ALLOTTED = d.Allotted(4)
GAVE_UP = d.GiveUp("no patience", retryable=True)
WAITING = {
    "requested": (ALLOTTED,),
    "accepted": (ALLOTTED, d.Accepted()),
    "receiving": (ALLOTTED, d.Accepted(), d.ImmediatesSeen()),
    "receiving before the accept": (ALLOTTED, d.ImmediatesSeen()),
}
waiting = pytest.mark.parametrize("before", WAITING.values(), ids=WAITING.keys())


def test_decode_arms_and_only_then_asks() -> None:
    assert d.DecodeHandoff().handle(ALLOTTED) == [d.ArmCounter(4), d.SendRequest()]


@waiting
def test_decode_is_ready_at_the_full_count(before: tuple[d.DecodeEvent, ...]) -> None:
    machine = decode_after(*before)
    assert machine.handle(d.CountFull()) == [d.Deliver()]
    assert machine.state is d.DecodeState.READY
    late = (d.CountFull(), GAVE_UP, d.PeerRevoked("x"), d.QuiescedAt(4, 4, "x"), d.Rejected("x", True), d.Accepted())
    assert not any(machine.handle(event) for event in late)


@waiting
def test_decode_gives_up_and_waits_for_the_answer(before: tuple[d.DecodeEvent, ...]) -> None:
    machine = decode_after(*before)
    assert machine.handle(GAVE_UP) == [d.SendCancel(), d.QuarantinePages(), d.Fail("no patience", True)]
    assert machine.handle(GAVE_UP) == machine.handle(d.Accepted()) == machine.handle(d.ImmediatesSeen()) == []
    assert machine.handle(d.QuiescedAt(3, 2, "cancelled")) == [d.Retarget(3)]
    assert machine.state is d.DecodeState.QUARANTINED
    assert machine.handle(d.CancelUnanswered(final=False)) == []
    assert machine.handle(d.CountFull()) == [d.Free(quarantined=True)]
    assert machine.state is d.DecodeState.FREE


@waiting
def test_decode_gives_up_and_all_has_come(before: tuple[d.DecodeEvent, ...]) -> None:
    assert decode_after(*before, GAVE_UP).handle(d.QuiescedAt(2, 2, "cancelled")) == [d.Free(quarantined=True)]
    assert decode_after(*before, GAVE_UP).handle(d.CountFull()) == [d.Free(quarantined=True)]
    assert decode_after(*before, GAVE_UP).handle(d.Rejected("full", True)) == [d.Free(quarantined=True)]


@waiting
def test_decode_asks_again_and_then_revokes(before: tuple[d.DecodeEvent, ...]) -> None:
    machine = decode_after(*before, GAVE_UP)
    assert machine.handle(d.CancelUnanswered(final=False)) == [d.SendCancel()]
    assert machine.handle(d.CancelUnanswered(final=True)) == [d.RevokePeer()]
    assert machine.handle(d.PeerRevoked("silent")) == [d.Free(quarantined=True)]


@waiting
def test_decode_is_told_that_nothing_will_come(before: tuple[d.DecodeEvent, ...]) -> None:
    failed = d.Fail("x", retryable=True)
    assert decode_after(*before).handle(d.QuiescedAt(0, 0, "x")) == [d.Free(quarantined=False), failed]
    assert decode_after(*before).handle(d.QuiescedAt(2, 1, "x")) == [d.QuarantinePages(), d.Retarget(2), failed]
    rejected = decode_after(*before).handle(d.Rejected("too large", False))
    assert rejected == [d.Free(quarantined=False), d.Fail("too large", retryable=False)]
    assert decode_after(*before).handle(d.PeerRevoked("x")) == [d.Free(quarantined=False), failed]


def test_decode_ends_before_anything_was_sent() -> None:
    for event in (GAVE_UP, d.PeerRevoked("no patience")):
        machine = d.DecodeHandoff()
        assert machine.handle(event) == [d.Fail("no patience", retryable=True)]
        assert machine.handle(ALLOTTED) == []


RUNNING = (p.SourcePagesAllotted(), p.LayersComputed(2))
ENDED_WELL = p.TransferEnded(2, None)


def test_prefill_runs_to_its_end() -> None:
    machine = p.PrefillHandoff()
    assert machine.handle(p.SourcePagesAllotted()) == [p.SubmitJob()]
    assert machine.handle(p.LayersComputed(1)) == [p.PostLayers()]
    assert machine.handle(p.LayersComputed(0)) == []  # pages that D has already
    assert machine.handle(ENDED_WELL) == []
    assert machine.handle(p.LayersComputed(1)) == [p.PostLayers()]
    assert machine.handle(p.PrefillComputed()) == []
    assert machine.state is p.PrefillState.DRAINING
    assert machine.handle(ENDED_WELL) == [p.FreeSourcePages(), p.SendDone(4)]
    assert machine.ended and machine.handle(p.StopAsked("late")) == machine.handle(p.EngineLetGo()) == []


def test_prefill_is_stopped_before_it_has_pages() -> None:
    assert p.PrefillHandoff().handle(p.StopAsked("x")) == [p.SendQuiesced(0, "x")]
    assert p.PrefillHandoff().handle(p.StopAsked("x", answer=False)) == []


def test_prefill_answers_a_stop_when_the_writes_have_drained_and_frees_when_the_engine_has_let_go() -> None:
    machine = prefill_after(*RUNNING)
    assert machine.handle(p.StopAsked("x")) == [p.StopJob(), p.StopTransfers()]
    assert machine.handle(p.LayersComputed(1)) == machine.handle(p.StopAsked("y")) == []
    assert machine.handle(p.TransferEnded(1, "cancelled")) == []
    assert machine.handle(p.TransferEnded(0, "cancelled")) == [p.SendQuiesced(1, "x")]
    assert not machine.ended
    assert machine.handle(p.EngineLetGo()) == [p.FreeSourcePages()]
    assert machine.state is p.PrefillState.QUIESCED


def test_prefill_whose_engine_lets_go_first() -> None:
    machine = prefill_after(*RUNNING, p.StopAsked("x"))
    assert machine.handle(p.PrefillComputed()) == []
    assert machine.handle(ENDED_WELL) == []
    assert machine.handle(ENDED_WELL) == [p.FreeSourcePages(), p.SendQuiesced(4, "x")]


def test_prefill_whose_writes_fail_stops_by_itself() -> None:
    machine = prefill_after(*RUNNING)
    assert machine.handle(p.TransferEnded(1, "broken")) == [p.StopJob(), p.StopTransfers()]
    assert machine.handle(p.TransferEnded(0, "broken too")) == [p.SendQuiesced(1, "broken")]
    draining = prefill_after(*RUNNING, p.PrefillComputed())
    assert draining.handle(p.TransferEnded(1, "broken")) == [p.StopTransfers()]
    assert draining.handle(p.TransferEnded(2, None)) == [p.FreeSourcePages(), p.SendQuiesced(3, "broken")]


def test_prefill_tells_nobody_once_the_decode_node_is_lost() -> None:
    machine = prefill_after(*RUNNING, p.StopAsked("x"), p.StopAsked("lost", answer=False))
    assert machine.handle(ENDED_WELL) == machine.handle(ENDED_WELL) == []
    assert machine.handle(p.EngineLetGo()) == [p.FreeSourcePages()]


def on(listing: Callable[[World], list[Any]], **drawn: st.SearchStrategy[Any]) -> Callable[..., Any]:
    """A rule about one of the things that `listing` finds, whichever."""

    def decorate(act: Callable[..., None]) -> Any:
        @precondition(lambda self: bool(listing(self.world)))
        @rule(index=st.integers(0, 7), **drawn)
        def step(self: Any, index: int, **values: Any) -> None:
            found = listing(self.world)
            act(self, found[index % len(found)], **values)

        return step

    return decorate


def targets(world: World) -> list[Any]:
    return list(world.targets.values())


def sources(world: World) -> list[Any]:
    return list(world.sources.values())


def unfinished(world: World) -> list[Any]:
    every = [transfer for source in sources(world) for transfer in source.transfers]
    return [t for t in every if not t.stopped and not t.done and len(t.posted) < PAGES_EACH]


FATES = st.sampled_from(["deliver", "deliver", "deliver", "repeat", "lose"])


class Handoffs(RuleBasedStateMachine):
    """Any order of events. The world asserts that nothing is reused too early and that ready means the full count."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @precondition(lambda self: self.world.free_pages and self.world.slots.free)
    @rule()
    def start(self) -> None:
        self.world.start()

    @on(lambda world: world.to_prefill, fate=FATES)
    def message_to_prefill(self, message: Any, fate: str) -> None:
        if fate != "repeat":
            self.world.to_prefill.remove(message)
        if fate != "lose":
            self.world.to_prefill_arrives(message)

    @on(lambda world: world.to_decode, fate=FATES)
    def message_to_decode(self, message: Any, fate: str) -> None:
        if fate != "repeat":
            self.world.to_decode.remove(message)
        if fate != "lose":
            self.world.to_decode_arrives(message)

    @on(lambda world: [s for s in sources(world) if s.machine.state is p.PrefillState.QUEUED and not s.has_pages])
    def admit(self, source: Any) -> None:
        self.world.admit(source)

    @on(lambda world: [source for source in sources(world) if source.at_engine])
    def compute(self, source: Any) -> None:
        self.world.compute(source)

    @on(lambda world: [source for source in sources(world) if source.let_go_due])
    def engine_lets_go(self, source: Any) -> None:
        self.world.let_go(source)

    @on(lambda world: [source for source in sources(world) if source.at_engine])
    def engine_fault(self, source: Any) -> None:
        self.world.engine_fault(source)

    @on(unfinished)
    def post(self, transfer: Any) -> None:
        self.world.post(transfer)

    @on(lambda world: [write for write in world.writes if not write.landed])
    def land(self, write: Any) -> None:
        self.world.land(write)

    @on(lambda world: [write for write in world.writes if not write.completed])
    def complete(self, write: Any) -> None:
        self.world.complete(write)

    @on(targets)
    def give_up(self, target: Any) -> None:
        self.world.feed_target(target, GAVE_UP)

    @on(lambda world: [t for t in targets(world) if t.machine.state in d.HELD], final=st.booleans())
    def cancel_unanswered(self, target: Any, final: bool) -> None:
        self.world.feed_target(target, d.CancelUnanswered(final))

    @precondition(lambda self: self.world.to_prefill or self.world.sources)
    @rule()
    def progress(self) -> None:
        """All that was sent to P arrives, and every handoff there gets on by one step; without it few get far."""
        for message in World.take(self.world.to_prefill):
            self.world.to_prefill_arrives(message)
        self.world.work()

    @precondition(lambda self: self.world.sources)
    @rule(kind=st.sampled_from(["P's deadline", "D revokes P", "P loses D", "P restarts"]))
    def disturb(self, kind: str) -> None:
        if kind == "P's deadline":
            self.world.feed_source(sources(self.world)[0], p.StopAsked("too late"))
        elif kind == "D revokes P":
            self.world.revoke()
        elif kind == "P loses D":
            self.world.lose_decode()
        else:
            self.world.restart_prefill()

    def teardown(self) -> None:
        world = self.world
        world.come_to_rest()
        assert not world.targets and not world.sources, "every handoff ends"
        assert len(world.free_pages) == 3 * PAGES_EACH and world.slots.free == 3


Handoffs.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
test_any_order_of_events = Handoffs.TestCase


def test_the_world_delivers() -> None:
    """The play itself works: undisturbed, every handoff becomes ready."""
    world = World()
    for _ in range(3):
        world.start()
    world.come_to_rest()
    assert world.delivered == 3 and not world.targets
