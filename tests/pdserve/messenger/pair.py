"""A prefill side and decode sides in one process: real engines, real messenger, any transport; the channels are direct
calls that a test may drop, delay or repeat."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.config import EngineSettings, HandoffSettings
from pdserve.engine.engine import Engine
from pdserve.engine.limits import context_tokens, page_geometry
from pdserve.kv.memory import KvMemory
from pdserve.kv.pool import PagePool
from pdserve.messenger.meeting import Transports
from pdserve.messenger.peers import ReceiverParts
from pdserve.messenger.receiver import Receiver
from pdserve.messenger.sender import Sender, SenderParts
from pdserve.messenger.wire import PROTOCOL_VERSION, MeetCallback, MeetRequest, NodeCard
from pdserve.models.api import Model
from pdserve.types import GenerationRequest, Incarnation, NodeId, RequestId, Role, SamplingParams, SequenceOutput
from policies.sharding import LayerGroup, ParallelLayout
from transport.api import Memory, Transport

OpenTransport = Callable[[str], Transport]
_incarnations = itertools.count(1)


@dataclass
class Side:
    """What both kinds of node have."""

    node: NodeId
    role: Role
    model: Model
    settings: EngineSettings
    provider: str
    open_transport: OpenTransport
    handoff: HandoffSettings = field(default_factory=HandoffSettings)

    def __post_init__(self) -> None:
        geometry = page_geometry(self.model.config, self.settings)
        self.memory = KvMemory(geometry)
        self.pool = PagePool(geometry.pages)
        self.transports = Transports(self.open_transport, Memory(self.memory.address, geometry.region_bytes))
        config = self.model.config
        self.card = NodeCard(
            node_id=self.node,
            incarnation=Incarnation(next(_incarnations)),
            role=self.role,
            host="here",
            pid=os.getpid(),
            providers=(self.provider,),
            protocol=PROTOCOL_VERSION,
            model=config.name,
            fingerprint=config.fingerprint,
            dtype=self.settings.dtype,
            page_size=self.settings.page_size,
            kv_layout=geometry.layout,
            head_dim=config.head_dim,
            groups=(LayerGroup(config.layers, config.kv_heads),),
            parallel=ParallelLayout(),
            max_model_len=context_tokens(config, self.settings),
        )

    def close_core(self) -> None:
        self.transports.close()
        self.memory.close()


class Channel:
    """Direct calls into the other side; `tamper` may swallow, keep or repeat what is sent."""

    def __init__(self, deliver: Callable[[Any], None], meet: Callable[..., None] | None = None) -> None:
        self._deliver = deliver
        self._meet = meet
        self.tamper: Callable[[Any, Callable[[Any], None]], None] | None = None
        self.sent: list[Any] = []

    def meet(self, request: MeetRequest, on_reply: MeetCallback) -> None:
        assert self._meet is not None
        self._meet(request, on_reply)

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if self.tamper is not None:
            self.tamper(message, self._deliver)
        else:
            self._deliver(message)


class PrefillSide(Side):
    def start(self, channel: Callable[[NodeId], Channel]) -> None:
        self.sender = Sender(SenderParts(self.card, self.memory, self.pool, self.transports, self.provider, channel))
        self.engine = Engine(
            self.model, self.memory, self.pool, self.settings, Role.PREFILL, prefill_hooks=self.sender
        )
        self.sender.attach(self.engine, self.engine.layer_counter)
        self.engine.start()

    def close(self) -> None:
        self.engine.close()
        self.sender.close()
        self.close_core()


class DecodeSide(Side):
    def start(self, network: Network) -> None:
        self.tokens: dict[RequestId, list[int]] = {}
        self.ended: dict[RequestId, SequenceOutput] = {}
        self._changed = threading.Condition()
        self.receiver = Receiver(
            ReceiverParts(
                card=self.card,
                memory=self.memory,
                pool=self.pool,
                transports=self.transports,
                settings=self.handoff,
                provider=self.provider,
                window=64,
                channel=network.to_prefill,
                card_of=network.card_of,
                reroute=network.reroute,
                emit=self._emit,
            )
        )
        self.engine = Engine(
            self.model, self.memory, self.pool, self.settings, Role.DECODE, decode_hooks=self.receiver
        )
        self.receiver.attach(self.engine)
        self.engine.start()

    def _emit(self, outputs: tuple[SequenceOutput, ...]) -> None:
        with self._changed:
            for output in outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.tokens)
                if output.finish is not None:
                    self.ended[output.request_id] = output
            self._changed.notify_all()

    def request(self, name: str, prompt: tuple[int, ...], prefill: NodeId, max_tokens: int = 8) -> RequestId:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = GenerationRequest(RequestId(name), prompt, sampling)
        self.receiver.start(request, prefill)
        return request.request_id

    def wait(self, *names: str, timeout_s: float = 30.0) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: all(RequestId(n) in self.ended for n in names), timeout_s)
        assert done, f"not ended: {[n for n in names if RequestId(n) not in self.ended]}"

    def close(self) -> None:
        self.engine.close()
        self.receiver.close()
        self.close_core()


@dataclass
class Network:
    """Several prefill and decode sides that can reach each other."""

    model: Model
    settings: EngineSettings
    provider: str
    open_transport: OpenTransport
    handoff: HandoffSettings = field(default_factory=HandoffSettings)

    def __post_init__(self) -> None:
        self.prefill: dict[NodeId, PrefillSide] = {}
        self.decode: dict[NodeId, DecodeSide] = {}
        self.channels: dict[NodeId, Channel] = {}
        self.settings_of: dict[str, EngineSettings] = {}

    def add_prefill(self, name: str = "p0", **changes: Any) -> PrefillSide:
        settings = self.settings.model_copy(update=changes)
        side = PrefillSide(NodeId(name), Role.PREFILL, self.model, settings, self.provider, self.open_transport)
        side.start(lambda node: self.channels[node])
        self.prefill[side.node] = side
        self.channels[side.node] = Channel(side.sender.on_message, side.sender.meet)
        return side

    def add_decode(self, name: str = "d0", **changes: Any) -> DecodeSide:
        settings = self.settings.model_copy(update=changes)
        node, role = NodeId(name), Role.DECODE
        side = DecodeSide(node, role, self.model, settings, self.provider, self.open_transport, self.handoff)
        side.start(self)
        self.decode[side.node] = side
        self.channels[side.node] = Channel(side.receiver.on_message)
        return side

    def to_prefill(self, node: NodeId) -> Channel:
        return self.channels[node]

    def card_of(self, node: NodeId) -> NodeCard | None:
        side = self.prefill.get(node)
        return None if side is None else side.card

    def reroute(self, request_id: RequestId, exclude: frozenset[NodeId], reply: Callable[[NodeId | None], None]) -> None:
        reply(next((node for node in self.prefill if node not in exclude), None))

    def settle(self, timeout_s: float = 10.0) -> None:
        """Waits until no page is used or quarantined anywhere."""
        deadline = time.monotonic() + timeout_s
        sides: list[Side] = [*self.prefill.values(), *self.decode.values()]
        while any(side.pool.free_pages != side.pool.total for side in sides):
            state = {side.node: side.pool.counts() for side in sides}
            assert time.monotonic() < deadline, f"pages (free, used, quarantined): {state}"
            time.sleep(0.01)

    def close(self) -> None:
        for side in [*self.decode.values(), *self.prefill.values()]:
            side.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


