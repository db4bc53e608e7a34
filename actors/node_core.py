"""What every node is made of: a model, KV memory and its page pool, transports, a card, and reports on itself."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ray.exceptions import RayError

from actors.metrics import labelled
from actors.names import scheduler_handle
from pdserve.config import Settings
from pdserve.engine.engine import Engine
from pdserve.engine.limits import context_tokens, page_geometry
from pdserve.kv.memory import KvMemory
from pdserve.kv.pool import PagePool
from pdserve.messenger.liveness import host_identity
from pdserve.messenger.meeting import Transports, WireWish
from pdserve.messenger.wire import PROTOCOL_VERSION, NodeCard
from pdserve.messenger.wires import Wires, find_wires, open_wire
from pdserve.models.load import load_model
from pdserve.types import Incarnation, NodeId, Role
from policies.routing import NodeSnapshot
from policies.sharding import LayerGroup, ParallelLayout
from transport.api import Memory

_log = logging.getLogger(__name__)

REPORT_S = 0.2
REPORT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What a node is told at its start; the same again when Ray restarts it."""

    node_id: NodeId
    role: Role
    settings: Settings
    model_path: str
    core: int | None = None


class NodeCore:
    """Built in the actor's constructor; `close()` frees everything in the right order."""

    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        if spec.core is not None:
            os.sched_setaffinity(0, {spec.core})
        settings = spec.settings.engine
        self.model = load_model(spec.model_path, settings.dtype, deterministic=settings.deterministic)
        self.geometry = page_geometry(self.model.config, settings)
        self.memory = KvMemory(self.geometry)
        self.pool = PagePool(self.geometry.pages)
        self.incarnation = Incarnation(secrets.randbits(64))
        wanted = spec.settings.transport
        # A transport's worker thread inherits the affinity from above: pinned nodes stay on their core.
        self.transports = Transports(
            partial(open_wire, wanted), Memory(self.memory.address, self.geometry.region_bytes)
        )
        self.wish = WireWish(wanted.provider, wanted.allow_tcp)
        self.card = self._make_card()

    def _make_card(self) -> NodeCard:
        config, settings = self.model.config, self.spec.settings
        wires = Wires() if self.spec.role is Role.COLOCATED else find_wires(settings.transport)
        return NodeCard(
            node_id=self.spec.node_id,
            incarnation=self.incarnation,
            role=self.spec.role,
            host=host_identity(),
            pid=os.getpid(),
            providers=wires.providers,
            protocol=PROTOCOL_VERSION,
            model=config.name,
            fingerprint=config.fingerprint,
            dtype=settings.engine.dtype,
            page_size=settings.engine.page_size,
            kv_layout=self.geometry.layout,
            head_dim=config.head_dim,
            groups=(LayerGroup(config.layers, config.kv_heads),),
            parallel=ParallelLayout(layout=self.geometry.layout),
            max_model_len=context_tokens(config, settings.engine),
            rdma=wires.rdma,
            nics=wires.nics,
        )

    def snapshot(self, engine: Engine, *, ready: bool, waiting: int = 0, queued_tokens: int = 0) -> NodeSnapshot:
        load = engine.load()
        return NodeSnapshot(
            node_id=self.spec.node_id,
            incarnation=self.incarnation,
            role=self.spec.role,
            ready=ready,
            compatibility=self.card.compatibility,
            queued_prefill_tokens=load.queued_prefill_tokens + queued_tokens,
            running=load.running,
            waiting=load.waiting + waiting,
            free_pages=load.free_pages,
            total_pages=load.total_pages,
            page_size=self.geometry.page_size,
        )

    def metrics(self, engine: Engine) -> dict[str, float]:
        """Gauges and counters of this node, by the field's names."""
        load, stats = engine.load(), engine.stats()
        values: dict[str, float] = {
            "num_requests_running": load.running,
            "num_requests_waiting": load.waiting,
            "kv_cache_usage_perc": 1 - load.free_pages / load.total_pages,
            "kv_cache_free_pages": load.free_pages,
            "kv_cache_quarantined_pages": load.quarantined_pages,
            "kv_cache_total_pages": load.total_pages,
            "preemptions_total": stats.preemptions,
            "engine_steps_total": stats.steps,
            "engine_step_seconds_total": stats.step_s,
        }
        for counters in self.transports.stats().values():
            for name, value in counters.items():
                key = f"kv_transfer_{name}" if name == "links_open" else f"kv_transfer_{name}_total"
                values[key] = values.get(key, 0) + value
        for opened in self.transports.all():
            wire = opened.transport
            labels = {"provider": wire.provider, "wire": wire.description, "reason": opened.reason}
            values[labelled("kv_transfer_wire_info", **labels)] = 1
        return values

    def close(self) -> None:
        """After the engine and the messenger have been closed."""
        self.transports.close()
        self.memory.close()


Report = Callable[[], NodeSnapshot]
OnPeers = Callable[[list[NodeCard]], None]


class Reporter:
    """A thread that tells the global scheduler how this node is, and hears which prefill nodes there are.

    It also ends the process when the transport's worker has died, which nothing here can mend: Ray restarts the node.
    """

    def __init__(self, core: NodeCore, report: Report, on_peers: OnPeers | None = None) -> None:
        self._core = core
        self._report = report
        self._on_peers = on_peers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pdserve-reporter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(REPORT_S):
            fault = self._core.transports.fault()
            if fault is not None:
                _log.critical("%s ends, to be restarted: its transport has failed: %s", self._core.spec.node_id, fault)
                os._exit(1)
            try:
                peers = (
                    scheduler_handle().report.remote(self._core.card, self._report()).future().result(REPORT_TIMEOUT_S)
                )
                if self._on_peers is not None:
                    self._on_peers(peers)
            except (RayError, ValueError, TimeoutError) as error:
                _log.info("the global scheduler cannot be reached: %s", error)
            except Exception:
                _log.exception("a report failed")
