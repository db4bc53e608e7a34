"""One node in a process of its own, so that it can be killed; control messages go through a pipe."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from pdserve.messenger.wire import MeetCallback, MeetRequest, NodeCard
from pdserve.types import Incarnation, NodeId, Role
from tests.pdserve.engine.toy import ToyModel
from tests.pdserve.messenger.pair import PATIENCE_S, SETTINGS, DecodeSide, PrefillSide
from tests.pdserve.messenger.stepped import SteppedModel
from transport.open import open_transport


@dataclass(eq=False)
class Line:
    """Both ends of a pipe have one: a channel towards the other process, and a reader of what comes from there."""

    connection: Connection
    meet_here: Callable[[MeetRequest, MeetCallback], None] | None = None
    control_here: Callable[[Any], None] | None = None
    card: NodeCard | None = None
    reached: threading.Event = field(default_factory=threading.Event)
    introduced: threading.Event = field(default_factory=threading.Event)
    sent: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._on_reply: MeetCallback | None = None
        self.reader = threading.Thread(target=self.read, name="line", daemon=True)

    def tell(self, kind: str, payload: Any = None) -> None:
        with self._lock:
            self.connection.send((kind, payload))

    def send(self, message: Any) -> None:
        self.sent.append(message)
        self.tell("control", message)

    def meet(self, request: MeetRequest, on_reply: MeetCallback) -> None:
        self._on_reply = on_reply
        self.tell("meet", request)

    def read(self) -> None:
        """Until the other end is closed, or its process has ended."""
        while True:
            try:
                kind, payload = self.connection.recv()
            except (EOFError, OSError):
                return
            if kind == "close":
                return
            self._take(kind, payload)

    def _take(self, kind: str, payload: Any) -> None:
        if kind == "control" and self.control_here is not None:
            self.control_here(payload)
        elif kind == "meet" and self.meet_here is not None:
            self.meet_here(payload, lambda reply: self.tell("met", reply))
        elif kind == "met" and self._on_reply is not None:
            self._on_reply(payload)
        elif kind == "card":
            self.card = payload
            self.introduced.set()
        elif kind == "reached":
            self.reached.set()


def prefill_process(connection: Connection, name: str, provider: str, incarnation: int, hang_at_step: int) -> None:
    """`hang_at_step`: of that prefill step only the first layer is ever computed."""
    line = Line(connection)
    steps = [0]

    def before_layer(layer: int) -> None:
        steps[0] += layer == 0
        if (steps[0], layer) == (hang_at_step, 1):
            line.tell("reached")
            threading.Event().wait(PATIENCE_S)

    side = PrefillSide(NodeId(name), Role.PREFILL, SteppedModel(before_layer), SETTINGS, provider, open_transport)
    side.card = replace(side.card, incarnation=Incarnation(incarnation))
    side.start(SimpleNamespace(channel_to=lambda node: line))  # type: ignore[arg-type]
    line.meet_here, line.control_here = side.sender.meet, side.sender.on_message
    line.tell("card", side.card)
    line.read()
    side.close()


def decode_process(connection: Connection, provider: str, incarnation: int, prefill: NodeCard) -> None:
    """Asks for one long prompt."""
    line = Line(connection)
    side = DecodeSide(NodeId("d0"), Role.DECODE, ToyModel(), SETTINGS, provider, open_transport)
    side.card = replace(side.card, incarnation=Incarnation(incarnation))
    side.start(
        SimpleNamespace(channel_to=lambda node: line, card_of=lambda node: prefill, reroute=lambda *_: None)  # type: ignore[arg-type]
    )
    line.control_here = side.receiver.on_message
    side.request("r", 120)
    line.read()
    side.close()


@contextmanager
def started(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Line]]:
    """The process, and the line to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    line = Line(ours)
    try:
        yield process, line
    finally:
        if process.is_alive():
            line.tell("close")
            process.join(PATIENCE_S)
        process.kill()
        process.join()
        line.reader.join()
        ours.close()
