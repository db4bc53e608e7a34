"""Prefill sides and decode sides in one process: real engines, real messenger, any transport. Messages go by its links;
a test may drop, keep or repeat them, whichever way they go."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from pdserve.config import EngineSettings, HandoffSettings
from pdserve.engine.engine import Engine
from pdserve.engine.limits import context_tokens, page_geometry
from pdserve.kv.memory import KvMemory
from pdserve.messenger.meeting import ALONE, Replica, Transports, WireWish
from pdserve.messenger.peers import ReceiverParts
from pdserve.messenger.receiver import Receiver
from pdserve.messenger.sender import Sender, SenderParts
from pdserve.messenger.slots import SLOTS, SlotTable
from pdserve.messenger.wire import PROTOCOL_VERSION, NodeCard
from pdserve.models.api import Model
from pdserve.types import FinishReason, GenerationRequest, Incarnation, NodeId, RequestId, Role, SequenceOutput
from policies.sharding import LayerGroup, ParallelLayout
from policies.sources import SourcePolicy
from tests.pdserve.engine.toy import ToyModel, eventually, expected, make_request
from tests.pdserve.messenger.poisoned import PoisonedPool
from tests.pdserve.messenger.sharded import ShardedToy
from tests.pdserve.messenger.taps import Channel, tapped
from transport.api import Memory, Transport
from transport.choice import Choice
from transport.loopback import LoopbackNet, LoopbackTransport

SETTINGS = EngineSettings(dtype="fp32", page_size=8, chunk_tokens=16, max_batch=8, kv_cache_tokens=512)
PATIENCE_S = 30.0

OpenTransport = Callable[[str], Transport]
_incarnations = itertools.count(1)


class Process:
    """What the replicas of a node share: the memories of all their ranks, and the transports over them."""

    def __init__(
        self, model: Model, settings: EngineSettings, open_transport: OpenTransport, replicas: int = 1
    ) -> None:
        self.tp = model.tp if isinstance(model, ShardedToy) else 1
        self.geometry = page_geometry(model.config, settings, self.tp)
        self.memories = tuple(KvMemory(self.geometry) for _ in range(self.tp * replicas))
        memories = [Memory(memory.address, self.geometry.region_bytes) for memory in self.memories]
        self.transports = Transports(open_transport, *memories)
        self._replicas = replicas

    def close(self) -> None:
        """With the last of the replicas."""
        self._replicas -= 1
        if not self._replicas:
            self.transports.close()
            for memory in self.memories:
                memory.close()


@dataclass
class Side:
    """What both kinds of node have; or, of a node of several replicas, one of these, which share a `process`."""

    node: NodeId
    role: Role
    model: Model
    settings: EngineSettings
    provider: str
    open_transport: OpenTransport
    replica: Replica = field(default=ALONE, kw_only=True)
    process: Process | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._process = self.process or Process(self.model, self.settings, self.open_transport)
        geometry, tp = self._process.geometry, self._process.tp
        self.memories = self._process.memories[self.replica.ranks(tp)]
        if isinstance(self.model, ShardedToy):
            self.model.memories = self.memories
        self.memory = self.memories[0]
        self.pool = PoisonedPool(*self.memories)
        self.transports = self._process.transports
        self.closed = False
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
            parallel=ParallelLayout(tp, geometry.layout, self.replica.count),
            max_model_len=context_tokens(config, self.settings),
        )

    @property
    def transport(self) -> Transport:
        return self.transports.get(Choice(self.provider, "the test asks")).transport

    @property
    def wish(self) -> WireWish:
        return WireWish(self.provider)

    def close_core(self) -> None:
        self.closed = True
        self._process.close()


@dataclass
class PrefillSide(Side):
    random: Random = field(default_factory=Random, kw_only=True)
    source_policy: SourcePolicy = field(default=SourcePolicy.RANDOM, kw_only=True)

    def start(self, network: Network) -> None:
        self.network = network
        self.sender = Sender(
            SenderParts(
                self.card, self.memory, self.pool, self.transports, self.wish, network.channel_to, self.replica,
                random=self.random, source_policy=self.source_policy,
            )
        )  # fmt: skip
        self.engine = Engine(self.model, self.memory, self.pool, self.settings, Role.PREFILL, prefill_hooks=self.sender)
        self.sender.attach(self.engine, self.engine.layer_counter)
        self.engine.start()

    def die(self) -> None:
        """As if its process had been killed: nothing of it is heard and nothing of it lands any more."""
        self.network.down.add(self.node)
        self.network.channels[self.node].mute()
        self.network.silenced.add(self.card.incarnation)
        self.transports.close()

    def close(self) -> None:
        self.engine.close()
        self.sender.close()
        self.close_core()


@dataclass
class DecodeSide(Side):
    handoff: HandoffSettings = field(default_factory=HandoffSettings)
    window: int = 64
    slots: int = 4096

    def start(self, network: Network) -> None:
        self.tokens: dict[RequestId, list[int]] = {}
        self.ended: dict[RequestId, SequenceOutput] = {}
        self.faults: list[str] = []
        self._changed = threading.Condition()
        self.receiver = Receiver(
            ReceiverParts(
                card=self.card,
                memory=self.memory,
                pool=self.pool,
                transports=self.transports,
                settings=self.handoff,
                wish=self.wish,
                window=self.window,
                channel=network.channel_to,
                card_of=network.card_of,
                reroute=network.reroute,
                emit=self._emit,
                replica=self.replica,
            )
        )
        attempts = self.receiver._attempts
        attempts._slots = attempts._held._slots = SlotTable(self.slots, first=self.replica.number * SLOTS)
        self.engine = Engine(self.model, self.memory, self.pool, self.settings, Role.DECODE, decode_hooks=self.receiver)
        self.receiver.attach(self.engine)
        self.engine.start()

    def _emit(self, outputs: tuple[SequenceOutput, ...]) -> None:
        with self._changed:
            for output in outputs:
                if output.request_id in self.ended:
                    self.faults.append(f"{output} after the end")
                self.tokens.setdefault(output.request_id, []).extend(output.tokens)
                if output.finish is not None:
                    self.ended[output.request_id] = output
            self._changed.notify_all()

    def request(self, name: str, prompt_tokens: int, prefill: str = "p0", max_tokens: int = 8) -> GenerationRequest:
        request = make_request(name, prompt_tokens, max_tokens)
        self.receiver.start(request, NodeId(prefill))
        return request

    def wait(self, *requests: GenerationRequest) -> None:
        ids = [request.request_id for request in requests]
        with self._changed:
            done = self._changed.wait_for(lambda: all(name in self.ended for name in ids), PATIENCE_S)
        assert done, f"not ended: {[name for name in ids if name not in self.ended]}"

    def wait_for_token(self, request: GenerationRequest) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.tokens.get(request.request_id)), PATIENCE_S)

    def check(self, *requests: GenerationRequest) -> None:
        """Each ends with exactly the tokens that the model gives without any cache."""
        self.wait(*requests)
        for request in requests:
            output = self.ended[request.request_id]
            answer, finish = expected(request, min(self.engine.max_model_len, 256))
            assert (tuple(self.tokens[request.request_id]), output.finish) == (answer, finish), output

    def error_of(self, request: GenerationRequest) -> str:
        self.wait(request)
        output = self.ended[request.request_id]
        assert output.finish is FinishReason.ERROR and output.error is not None, output
        return output.error

    @property
    def at_rest(self) -> bool:
        """No page, slot or counter is held; of the counters none of another replica of the node either."""
        attempts = self.receiver._attempts
        counters = self.transport.immediates
        idle = not self.receiver.handoffs and not counters._slots and not attempts._handoffs  # type: ignore[attr-defined]
        return idle and attempts._slots.free == self.slots and self.pool.free_pages == self.pool.total

    def close(self) -> None:
        self.engine.close()
        self.receiver.close()
        self.close_core()


@dataclass
class Network:
    """Several prefill and decode sides that can reach each other."""

    open_transport: OpenTransport
    provider: str = "loopback"
    settings: EngineSettings = SETTINGS
    handoff: HandoffSettings = field(default_factory=HandoffSettings)
    slots: int = 4096  # of each decode side

    def __post_init__(self) -> None:
        self.open_tapped = tapped(self.open_transport, lambda node: self.channels[NodeId(node)])
        self.prefill: dict[NodeId, PrefillSide] = {}
        self.decode: dict[NodeId, DecodeSide] = {}
        self.channels: dict[NodeId, Channel] = {}
        self.down: set[NodeId] = set()  # not offered to anybody
        self.silenced: set[Incarnation] = set()  # nothing that they send arrives
        self.cards: dict[NodeId, NodeCard] = {}
        self._dead: list[PrefillSide] = []

    def add_prefill(self, name: str = "p0", model: Model | None = None, **changes: Any) -> PrefillSide:
        """A node; or, of a name that there was before, its next incarnation."""
        settings = self.settings.model_copy(update=changes)
        return self.join_prefill(
            PrefillSide(NodeId(name), Role.PREFILL, model or ToyModel(), settings, self.provider, self.open_tapped)
        )

    def join_prefill(self, side: PrefillSide) -> PrefillSide:
        node = side.node
        side.start(self)
        if node in self.prefill:
            self._dead.append(self.prefill[node])
        self.prefill[node], self.cards[node] = side, side.card
        self.channels.setdefault(node, Channel()).lead_to(side.sender.on_message, side.sender.meet)
        self.down.discard(node)
        return side

    def add_decode(self, name: str = "d0", model: Model | None = None, window: int = 64, **changes: Any) -> DecodeSide:
        settings = self.settings.model_copy(update=changes)
        return self.join_decode(
            DecodeSide(
                NodeId(name), Role.DECODE, model or ToyModel(), settings, self.provider, self.open_tapped,
                self.handoff, window, self.slots,
            )
        )  # fmt: skip

    def join_decode(self, side: DecodeSide) -> DecodeSide:
        side.start(self)
        self.decode[side.node] = side
        self.channels[side.node] = Channel()
        self.channels[side.node].lead_to(lambda message: self._to_decode(side, message))
        return side

    def _to_decode(self, side: DecodeSide, message: Any) -> None:
        if message.source not in self.silenced:
            side.receiver.on_message(message)

    def channel_to(self, node: NodeId) -> Channel:
        return self.channels[node]

    def card_of(self, node: NodeId) -> NodeCard | None:
        return self.cards.get(node)

    def reroute(
        self, request_id: RequestId, exclude: frozenset[NodeId], reply: Callable[[NodeId | None], None]
    ) -> None:
        reply(next((node for node in self.prefill if node not in exclude and node not in self.down), None))

    def settle(self) -> None:
        """Waits until no page, slot or counter is held anywhere; dead nodes apart."""
        eventually(lambda: all(side.at_rest for side in self.decode.values() if not side.closed), PATIENCE_S)
        assert not any(side.faults for side in self.decode.values())
        alive = [side for node, side in self.prefill.items() if node not in self.down and not side.closed]
        eventually(lambda: all(side.sender.active == 0 for side in alive), PATIENCE_S)
        for side in alive:
            assert side.pool.free_pages == side.pool.total, side.pool.counts()
        for each in [*alive, *(side for side in self.decode.values() if not side.closed)]:
            each.pool.examine()
            assert not each.pool.faults

    def close(self) -> None:
        sides: list[Any] = [*self.decode.values(), *self.prefill.values(), *self._dead]
        for side in sides:
            if not side.closed:
                side.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def loopback(
    seed: int | None = 1, delay_s: tuple[float, float] = (0.0, 0.002), handoff: HandoffSettings | None = None, **of: Any
) -> Network:
    """A network whose writes land in any order, late."""
    net = LoopbackNet()
    return Network(
        lambda provider: LoopbackTransport(net, seed=seed, delay_s=delay_s, **of),
        handoff=handoff or HandoffSettings(),
    )


QUICK = HandoffSettings(request_timeout_s=0.3, transfer_timeout_s=0.6, failover_timeout_s=0.5)
