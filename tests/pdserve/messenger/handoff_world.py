"""Both handoff machines over a network that delays, loses, repeats and reorders everything; what it must never do is
asserted where it would happen. No threads, no time: a test says what happens next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdserve.messenger.answers import Answers
from pdserve.messenger.handoff import decode as d
from pdserve.messenger.handoff import prefill as p
from pdserve.messenger.slots import SlotTable
from pdserve.messenger.wire import Accept, Cancel, Done, HandoffId, HandoffRequest, NotMet, Quiesced, Reject
from pdserve.types import Incarnation, NodeId, PageIndex
from transport.api import Imm

LAYERS, PAGES_EACH = 2, 2
EXPECTED = LAYERS * PAGES_EACH
DECODE = Incarnation(1)


@dataclass(eq=False)
class Write:
    """One write: it lands and completes, in any order."""

    transfer: Transfer
    page: PageIndex
    landed: bool = False
    completed: bool = False


@dataclass(eq=False)
class Transfer:
    """One layer's writes of one handoff."""

    request: HandoffRequest
    meeting: int
    pages: tuple[PageIndex, ...]
    posted: list[Write] = field(default_factory=list)
    stopped: bool = False
    done: bool = False


@dataclass(eq=False)
class Target:
    """D's entry of a handoff."""

    id: HandoffId
    pages: tuple[PageIndex, ...]
    imm: Imm
    meeting: int
    machine: d.DecodeHandoff = field(default_factory=d.DecodeHandoff)
    received: int = 0
    full_at: int | None = None
    quarantined: bool = False
    failed: int = 0


@dataclass(eq=False)
class Source:
    """P's entry of a handoff."""

    request: HandoffRequest
    machine: p.PrefillHandoff = field(default_factory=p.PrefillHandoff)
    transfers: list[Transfer] = field(default_factory=list)
    layers: int = 0
    at_engine: bool = False
    has_pages: bool = False
    let_go_due: bool = False


class World:
    def __init__(self) -> None:
        self.number = 0
        self.free_pages = [PageIndex(n) for n in range(3 * PAGES_EACH)]
        self.slots = SlotTable(3)
        self.targets: dict[HandoffId, Target] = {}
        self.delivered = 0
        self.to_prefill: list[Any] = []
        self.to_decode: list[Any] = []
        self.writes: list[Write] = []
        self.prefill = Incarnation(100)  # who lives at P
        self.sources: dict[HandoffId, Source] = {}
        self.answers: Answers | None = None  # None: P does not know D
        self.link: int | None = None  # the meeting whose link P holds
        self.meeting = 0  # D's meeting; its region is open
        self.known: Incarnation = self.prefill  # whom D has met
        self.meet()

    # ------------------------------------------------ meeting

    def meet(self) -> None:
        self.number += 1
        self.meeting, self.known = self.number, self.prefill
        self.lose_decode()
        self.answers, self.link = Answers(self.meeting), self.meeting

    def revoke(self) -> None:
        """D closes its link: nothing of that meeting lands any more. Then the two meet anew."""
        self.meeting = 0
        for target in list(self.targets.values()):
            self.feed_target(target, d.PeerRevoked("lost"))
        self.meet()

    def lose_decode(self) -> None:
        """P closes its link: every transfer is done, but what was posted may still land."""
        self.link, self.answers = None, None
        for source in list(self.sources.values()):
            self.feed_source(source, p.StopAsked("lost", answer=False))
        for source in list(self.sources.values()):
            for transfer in source.transfers:
                self.end_transfer(source, transfer, "the link was closed")

    def restart_prefill(self) -> None:
        self.prefill = Incarnation(self.prefill + 1)
        self.sources.clear()
        self.answers = self.link = None

    # ------------------------------------------------ D

    def start(self) -> None:
        self.number += 1
        pages = tuple(self.free_pages.pop() for _ in range(PAGES_EACH))
        target = Target(HandoffId(DECODE, self.number), pages, self.slots.take(), self.meeting)
        self.targets[target.id] = target
        self.feed_target(target, d.Allotted(EXPECTED))

    def feed_target(self, target: Target, event: d.DecodeEvent) -> None:
        for instruction in target.machine.handle(event):
            self.at_decode(target, instruction)

    def at_decode(self, target: Target, instruction: d.DecodeInstruction) -> None:
        match instruction:
            case d.ArmCounter(expected) | d.Retarget(expected):
                target.full_at = expected
                self.count_if_full(target)
            case d.SendRequest():
                self.to_prefill.append(
                    HandoffRequest(target.id, NodeId("d"), DECODE, self.known, (1, 2), 0, target.pages, target.imm, 1.0)
                )
            case d.SendCancel():
                self.to_prefill.append(Cancel(target.id, NodeId("d"), DECODE, self.known))
            case d.QuarantinePages():
                assert not target.quarantined
                target.quarantined = True
            case d.Deliver():
                assert target.received == EXPECTED and not target.quarantined and not target.failed
                self.delivered += 1
                self.give_back(target)
            case d.Free(quarantined):
                assert quarantined == target.quarantined
                self.give_back(target)
            case d.Fail():
                assert not target.failed
                target.failed += 1
            case d.RevokePeer():
                self.revoke()

    def give_back(self, target: Target) -> None:
        """The heart of it: no write may hit these pages any more, or count in this slot."""
        posted = [write for write in self.writes if write.transfer.request.id == target.id]
        landing = [write for write in posted if not write.landed and write.transfer.meeting == self.meeting]
        assert not landing, f"{target.id} is given back while {len(landing)} writes may land"
        del self.targets[target.id]
        self.slots.give_back(target.imm)
        self.free_pages += target.pages

    def to_decode_arrives(self, message: Any) -> None:
        target = self.targets.get(message.id)
        if isinstance(message, Done) or target is None:
            return
        if isinstance(message, NotMet):
            if message.target == self.known:
                self.revoke()
        elif message.source != self.known:
            return
        elif isinstance(message, Accept):
            self.feed_target(target, d.Accepted())
        elif isinstance(message, Reject):
            self.feed_target(target, d.Rejected(message.reason, message.retryable))
        else:
            self.feed_target(target, d.QuiescedAt(message.posted, target.received, message.reason))

    def land(self, write: Write) -> None:
        write.landed = True
        self.tidy()
        if write.transfer.meeting != self.meeting:
            return  # its region is closed
        request = write.transfer.request
        target = self.targets.get(request.id)
        assert target is not None, f"a write of {request.id} lands in memory that was given back"
        assert write.page in target.pages and request.imm == target.imm
        target.received += 1
        self.count_if_full(target)

    def count_if_full(self, target: Target) -> None:
        if target.full_at is not None and target.received >= target.full_at:
            target.full_at = None
            self.feed_target(target, d.CountFull())

    # ------------------------------------------------ P

    def to_prefill_arrives(self, message: Any) -> None:
        if message.target != self.prefill or self.answers is None:
            self.to_decode.append(NotMet(message.id, self.prefill, message.target, "not met"))
            return
        answer = self.answers.get(message.id)
        if isinstance(message, Cancel):
            self.cancel_arrives(message, answer)
        elif answer is not None:
            self.to_decode.append(answer)
        elif message.id in self.sources:
            self.to_decode.append(Accept(message.id, self.prefill, 0))
        elif not self.answers.void(message.id):
            self.sources[message.id] = Source(message)
            self.to_decode.append(Accept(message.id, self.prefill, 0))

    def cancel_arrives(self, message: Cancel, answer: Any) -> None:
        assert self.answers is not None
        if answer is None and message.id in self.sources:
            self.feed_source(self.sources[message.id], p.StopAsked("cancelled"))
        elif answer is not None or not self.answers.void(message.id):
            posted = answer.posted if isinstance(answer, Done | Quiesced) else 0
            self.finish(Quiesced(message.id, self.prefill, posted, "cancelled"))

    def finish(self, answer: Any) -> None:
        assert self.answers is not None
        self.answers.put(answer.id, answer)
        self.to_decode.append(answer)

    def feed_source(self, source: Source, event: p.PrefillEvent) -> None:
        for instruction in source.machine.handle(event):
            self.at_prefill(source, instruction)
        if source.machine.ended:
            assert not source.has_pages and not source.at_engine
            self.sources.pop(source.request.id, None)

    def at_prefill(self, source: Source, instruction: p.PrefillInstruction) -> None:
        match instruction:
            case p.SubmitJob():
                source.at_engine = True
            case p.PostLayers():
                assert self.link is not None
                source.transfers.append(Transfer(source.request, self.link, source.request.pages))
            case p.StopJob():
                source.let_go_due = True
            case p.StopTransfers():
                for transfer in source.transfers:
                    transfer.stopped = True
                    self.end_if_done(source, transfer)
            case p.FreeSourcePages():
                assert source.has_pages and not source.at_engine
                assert all(transfer.done for transfer in source.transfers)
                source.has_pages = False
            case p.SendDone(posted):
                assert posted == EXPECTED
                self.finish(Done(source.request.id, self.prefill, posted, None))
            case p.SendQuiesced(posted, reason):
                assert posted == sum(len(transfer.posted) for transfer in source.transfers)
                self.finish(Quiesced(source.request.id, self.prefill, posted, reason))

    def admit(self, source: Source) -> None:
        source.has_pages = True
        self.feed_source(source, p.SourcePagesAllotted())

    def compute(self, source: Source) -> None:
        """The engine gets one layer further; after the last it is done with the job."""
        source.layers += 1
        self.feed_source(source, p.LayersComputed(1))
        if source.layers == LAYERS:
            source.at_engine = False
            self.feed_source(source, p.PrefillComputed())

    def let_go(self, source: Source) -> None:
        source.at_engine = source.let_go_due = False
        self.feed_source(source, p.EngineLetGo())

    def engine_fault(self, source: Source) -> None:
        self.let_go(source)
        self.feed_source(source, p.StopAsked("a kernel has failed"))

    def post(self, transfer: Transfer) -> None:
        write = Write(transfer, transfer.pages[len(transfer.posted)])
        transfer.posted.append(write)
        self.writes.append(write)

    def complete(self, write: Write) -> None:
        write.completed = True
        self.tidy()
        source = self.sources.get(write.transfer.request.id)
        if source is not None and write.transfer in source.transfers:
            self.end_if_done(source, write.transfer)

    def end_if_done(self, source: Source, transfer: Transfer) -> None:
        if all(write.completed for write in transfer.posted) and (
            transfer.stopped or len(transfer.posted) == len(transfer.pages)
        ):
            self.end_transfer(source, transfer, "cancelled" if len(transfer.posted) < len(transfer.pages) else None)

    def end_transfer(self, source: Source, transfer: Transfer, error: str | None) -> None:
        if not transfer.done:
            transfer.done = True
            self.feed_source(source, p.TransferEnded(len(transfer.posted), error))

    def tidy(self) -> None:
        self.writes = [
            write for write in self.writes if not (write.landed and (write.completed or write.transfer.done))
        ]

    # ------------------------------------------------ rest

    def come_to_rest(self) -> None:
        """Nothing is lost any more, and every deadline passes."""
        for turn in range(60):
            for message in self.take(self.to_prefill):
                self.to_prefill_arrives(message)
            for message in self.take(self.to_decode):
                self.to_decode_arrives(message)
            self.work()
            for write in list(self.writes):
                if not write.landed:
                    self.land(write)
                if not write.completed:
                    self.complete(write)
            if turn > 20:
                for target in list(self.targets.values()):
                    self.feed_target(target, d.GiveUp("a deadline", retryable=True))
                    self.feed_target(target, d.CancelUnanswered(final=turn > 40))

    def work(self) -> None:
        for source in list(self.sources.values()):
            if source.let_go_due:
                self.let_go(source)
            elif source.machine.state is p.PrefillState.QUEUED and not source.has_pages:
                self.admit(source)
            elif source.at_engine:
                self.compute(source)
            for transfer in source.transfers:
                if not transfer.stopped and not transfer.done and len(transfer.posted) < len(transfer.pages):
                    self.post(transfer)

    @staticmethod
    def take(messages: list[Any]) -> list[Any]:
        taken = list(messages)
        messages.clear()
        return taken
