"""What every node is made of: engine replicas with their model, KV memory, page pool and card, and transports."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import ray
from numpy.typing import NDArray

from actors.metrics import labelled
from actors.names import node_of, replica_address
from actors.rank import RankActors
from pdserve.config import Settings
from pdserve.engine.engine import Engine
from pdserve.engine.hooks import DecodeHooks, PrefillHooks
from pdserve.engine.limits import context_tokens, page_geometry
from pdserve.engine.ranks.leader import NodeRanks
from pdserve.engine.ranks.member import RankTask
from pdserve.errors import RankLost
from pdserve.kv.memory import KvMemory
from pdserve.kv.pool import PagePool
from pdserve.messenger.liveness import host_identity
from pdserve.messenger.meeting import Replica, Transports, WireWish
from pdserve.messenger.wire import PROTOCOL_VERSION, NodeCard
from pdserve.messenger.wires import Wires, find_wires, open_wire
from pdserve.models.api import Model, ModelConfig
from pdserve.models.load import load_model
from pdserve.parallel.gloo import RankLayout
from pdserve.types import Incarnation, NodeId, Role
from policies.layout import PageGeometry
from policies.routing import NodeSnapshot
from policies.sharding import LayerGroup, ParallelLayout
from transport.api import Memory

_log = logging.getLogger(__name__)

RESTART_PAUSE_S = 1.0
COME_S = 30.0  # for ranks whose processes run already to meet
ONE_RANK = RankLayout()


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What a node is told at its start; the same again when Ray restarts it."""

    node_id: NodeId
    role: Role
    settings: Settings
    model_path: str
    layout: RankLayout = ONE_RANK
    cores: tuple[int, ...] = ()  # one per rank, where they are pinned


@dataclass(frozen=True, slots=True)
class ReplicaCore:
    """What one engine replica and its messenger are put together from."""

    replica: Replica
    card: NodeCard
    model: Model
    memory: KvMemory  # of its first rank
    pool: PagePool
    layer_counter: NDArray[np.int64] | None  # where another process bumps it

    def engine(
        self, settings: Settings, *, decode_hooks: DecodeHooks | None = None, prefill_hooks: PrefillHooks | None = None
    ) -> Engine:
        return Engine(
            self.model,
            self.memory,
            self.pool,
            settings.engine,
            self.card.role,
            decode_hooks=decode_hooks,
            prefill_hooks=prefill_hooks,
            layer_counter=self.layer_counter,
        )

    def snapshot(self, engine: Engine, *, ready: bool, waiting: int = 0, queued_tokens: int = 0) -> NodeSnapshot:
        load = engine.load()
        return NodeSnapshot(
            node_id=node_of(self.card.node_id),
            incarnation=self.card.incarnation,
            role=self.card.role,
            ready=ready,
            compatibility=self.card.compatibility,
            queued_prefill_tokens=load.queued_prefill_tokens + queued_tokens,
            running=load.running,
            waiting=load.waiting + waiting,
            free_pages=load.free_pages,
            total_pages=load.total_pages,
            page_size=self.card.page_size,
            replica=self.replica.number,
            rails=frozenset().union(*self.card.rails),
        )


class NodeCore:
    """Built in the actor's constructor, which is the leader of the node's ranks; `close()` frees everything in order.

    The transports are the leader's alone: the memory of all ranks is mapped here, and registered from here.
    Raises ModelError, RankLost, TransportError.
    """

    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        self.ranks: NodeRanks | None = None
        self.rank_pids: dict[int, int] = {}
        self._stack = ExitStack()
        if spec.cores:
            os.sched_setaffinity(0, {spec.cores[0]})
        wanted = spec.settings.transport
        self.wish = WireWish(wanted.provider, wanted.allow_tcp)
        try:
            models, memories = self._start_ranks() if spec.layout.ranks > 1 else self._start_alone()
            # A transport's worker thread inherits the affinity from above: pinned nodes stay on their core.
            regions = [Memory(memory.address, memory.geometry.region_bytes) for memory in memories]
            self.transports = Transports(partial(open_wire, wanted), *regions)
            self._stack.callback(self.transports.close)
            self.replicas = self._make_replicas(models, memories)
        except BaseException:
            self._stack.close()
            raise

    def _start_alone(self) -> tuple[Sequence[Model], Sequence[KvMemory]]:
        settings = self.spec.settings.engine
        model = load_model(self.spec.model_path, settings.dtype, deterministic=settings.deterministic)
        return [model], [self._stack.enter_context(KvMemory(page_geometry(model.config, settings)))]

    def _start_ranks(self) -> tuple[Sequence[Model], Sequence[KvMemory]]:
        try:
            self.ranks = ranks = self._meet_ranks()
        except Exception as error:
            # Ray gives an actor up for good when its constructor raises; one that is back after a loss tries again.
            if ray.get_runtime_context().was_current_actor_reconstructed:
                time.sleep(RESTART_PAUSE_S)
                self.end_process(str(error))
            raise
        return ranks.replicas, ranks.memories

    def _meet_ranks(self) -> NodeRanks:
        spec, settings = self.spec, self.spec.settings.engine
        others = RankActors(spec.layout.ranks, spec.cores, settings.threads)
        self._stack.callback(others.close)
        self.rank_pids = others.pids
        task = RankTask(others.folder, spec.layout, spec.model_path, settings, timeout_s=COME_S)
        others.run(task)
        try:
            return self._stack.enter_context(NodeRanks(task, on_lost=self.end_process))
        except RankLost as error:
            raise RankLost(f"{error}{others.why()}") from error

    def _make_replicas(self, models: Sequence[Model], memories: Sequence[KvMemory]) -> tuple[ReplicaCore, ...]:
        role, settings, tp = self.spec.role, self.spec.settings, self.spec.layout.tp
        wires = Wires() if role is Role.COLOCATED else find_wires(settings.transport)
        return tuple(
            ReplicaCore(
                replica=(replica := Replica(number, len(models))),
                card=self._card(replica, models[number].config, memories[0].geometry, wires),
                model=models[number],
                memory=memories[number * tp],
                pool=PagePool(settings.engine.pages),
                layer_counter=None if self.ranks is None else self.ranks.replicas[number].layer_counter,
            )
            for number in range(len(models))
        )

    def _card(self, replica: Replica, config: ModelConfig, geometry: PageGeometry, wires: Wires) -> NodeCard:
        settings, layout = self.spec.settings, self.spec.layout
        return NodeCard(
            node_id=replica_address(self.spec.node_id, replica.number, replica.count),
            incarnation=Incarnation(secrets.randbits(64)),
            role=self.spec.role,
            host=host_identity(),
            pid=os.getpid(),
            providers=wires.providers,
            protocol=PROTOCOL_VERSION,
            model=config.name,
            fingerprint=config.fingerprint,
            dtype=settings.engine.dtype,
            page_size=settings.engine.page_size,
            kv_layout=geometry.layout,
            head_dim=config.head_dim,
            groups=(LayerGroup(config.layers, config.kv_heads),),
            parallel=ParallelLayout(layout.tp, geometry.layout, layout.dp),
            max_model_len=context_tokens(config, settings.engine),
            rdma=wires.rdma,
            nics=wires.nics,
        )

    @property
    def card(self) -> NodeCard:
        """Its first replica's: all of them are alike but for address and incarnation."""
        return self.replicas[0].card

    def metrics(self, engines: Sequence[Engine]) -> dict[str, float]:
        """Gauges and counters of this node, by the field's names: sums over its replicas."""
        loads, stats = [engine.load() for engine in engines], [engine.stats() for engine in engines]
        free, total = sum(load.free_pages for load in loads), sum(load.total_pages for load in loads)
        values: dict[str, float] = {
            "num_requests_running": sum(load.running for load in loads),
            "num_requests_waiting": sum(load.waiting for load in loads),
            "kv_cache_usage_perc": 1 - free / total,
            "kv_cache_free_pages": free,
            "kv_cache_quarantined_pages": sum(load.quarantined_pages for load in loads),
            "kv_cache_total_pages": total,
            "preemptions_total": sum(each.preemptions for each in stats),
            "engine_steps_total": sum(each.steps for each in stats),
            "engine_step_seconds_total": sum(each.step_s for each in stats),
            "engine_replicas": len(engines),
            "engine_ranks": self.spec.layout.ranks,
        }
        return values | self._wire_metrics()

    def _wire_metrics(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for counters in self.transports.stats().values():
            for name, value in counters.items():
                key = f"kv_transfer_{name}" if name == "links_open" else f"kv_transfer_{name}_total"
                values[key] = values.get(key, 0) + value
        for opened in self.transports.all():
            wire = opened.transport
            labels = {"provider": wire.provider, "wire": wire.description, "reason": opened.reason}
            values[labelled("kv_transfer_wire_info", **labels)] = 1
        return values

    def end_process(self, reason: str) -> None:
        """For what nothing here can mend, a lost rank or a transport's dead worker: Ray restarts the node as a whole.

        At once, before the engines can tell anybody of steps that failed: streams then go on at other nodes.
        """
        _log.critical("%s ends, to be restarted: %s", self.spec.node_id, reason)
        os._exit(1)

    def close(self) -> None:
        """After the engines and the messengers have been closed."""
        self._stack.close()
