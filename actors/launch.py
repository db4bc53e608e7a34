"""Starts a cluster's nodes and its HTTP face, and ends all of it again. The composition root of the actors."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayError

from actors.colocated_node import ColocatedNode
from actors.connect import check_fits_here, joined_ray, own_ray
from actors.decode_node import DecodeNode
from actors.global_scheduler import GlobalScheduler
from actors.names import APPLICATION, NAMESPACE, SCHEDULER, node_handle
from actors.node_core import NodeSpec
from actors.placement import Placement, find_groups
from actors.prefill_node import PrefillNode
from pdserve.config import EMBEDDED_MODEL, Settings
from pdserve.engine.limits import context_tokens
from pdserve.errors import ConfigError, PdserveError
from pdserve.messenger.liveness import host_identity
from pdserve.messenger.target import HandoffTrace
from pdserve.messenger.wire import NodeCard
from pdserve.messenger.wires import find_wires, open_wire
from pdserve.models.api import ModelConfig
from pdserve.models.build import check_ranks
from pdserve.models.load import load_model, model_dir, read_config
from pdserve.observe import progress
from pdserve.parallel.gloo import RankLayout
from pdserve.types import NodeId, RequestId, Role
from policies.placement import Deployment, deployment_of, node_name
from transport.errors import TransportError
from transport.fabric.leftovers import remove_leftovers

_log = logging.getLogger(__name__)

START_S = 300.0
READY_S = 120.0
CLOSE_S = 20.0
CARDS_S = 5.0
ENDED_S = 5.0  # for processes that were ended to be gone
WATCH_S = 2.0
WATCH_TIMEOUT_S = 10.0
_AT_HEAD = {"node:__internal_head__": 0.001}
"""A place on Ray's head, without which nothing works anyway: no other host's loss takes the scheduler with it."""
_CLASSES: dict[Role, Any] = {Role.PREFILL: PrefillNode, Role.DECODE: DecodeNode, Role.COLOCATED: ColocatedNode}


class Cluster:
    """What `launch` has started. `close()` (or leaving the `with` block) ends it."""

    def __init__(self, settings: Settings, *, http: bool = True) -> None:
        self.settings = settings
        self.nodes: dict[NodeId, Any] = {}
        self.scheduler: Any = None
        self.model_path = ""
        self.max_model_len = 0
        self.model_name = settings.model.name or ""
        self.url = ""
        self._leave_serve = True
        self._pids: set[int] = set()
        self._ray = contextlib.ExitStack()
        try:
            self._start(http)
        except BaseException:
            self.close()
            raise

    def _start(self, http: bool) -> None:
        deployment = deployment_of(self.settings)
        if self.settings.ray_address is None:
            check_fits_here(deployment)
            self._check_wires()
            self._prepare_model(deployment)
            with progress("starting Ray"):
                self._ray.enter_context(own_ray(deployment))
        else:
            with progress("joining Ray"):
                self._ray.enter_context(joined_ray(self.settings.ray_address))
            find_groups(deployment)  # before the model, which may take a while
            self._prepare_model(deployment)
        placement = self._ray.enter_context(Placement(deployment))
        with progress(f"starting {len(placement.nodes)} nodes") as step:
            self.scheduler = self._actor(GlobalScheduler, SCHEDULER, num_cpus=0, resources=_AT_HEAD).remote()
            for spec in self._node_specs(deployment):
                actor = self._actor(_CLASSES[spec.role], spec.node_id, **placement.leader(spec.node_id))
                self.nodes[spec.node_id] = actor.remote(spec)
            self._await_nodes(step.update)
            self._check_providers()
        with progress("verifying transfers") as step:
            self._await_health(step.update)
        if http:
            with progress("starting HTTP"):
                self._serve()

    def _prepare_model(self, deployment: Deployment) -> None:
        """Whatever has to be converted or compiled is done here once, so that the nodes only map and load it."""
        engine, path = self.settings.engine, self.settings.model.path
        with progress("preparing the model") as step:
            path = path if path == EMBEDDED_MODEL else os.path.expanduser(path)
            self.model_path = str(model_dir(path, step.update).resolve())
            config = read_config(self.model_path)
            _check_ranks(config, deployment)
            self.max_model_len = min(context_tokens(config, engine), engine.pages * engine.page_size)
            load_model(self.model_path, engine.dtype, deterministic=engine.deterministic, progress=step.update)
        self.model_name = self.model_name or config.name

    def _check_wires(self) -> None:
        """Here, rather than in each node. Raises ConfigError."""
        if self.settings.deployment.colocated.count:
            return
        key = "libucp" if self.settings.transport.provider == "ucx" else "libfabric"
        try:
            find_wires(self.settings.transport)
        except TransportError as error:
            given = getattr(self.settings.transport, key)
            advice = f"; name another path, or leave transport.{key} out" if given else ""
            raise ConfigError(f"transport.{key}: {error}{advice}") from error
        wanted = self.settings.transport
        if wanted.nics is not None and wanted.provider != "auto":
            try:
                open_wire(wanted, wanted.provider).close()
            except TransportError as error:
                raise ConfigError(f"transport.nics: {error}") from error

    def _node_specs(self, deployment: Deployment) -> list[NodeSpec]:
        cores = cycle(sorted(os.sched_getaffinity(0)))
        specs: list[NodeSpec] = []
        for kind in deployment.kinds:
            layout = RankLayout(kind.parallel.tp, kind.parallel.dp, kind.ep)
            for index in range(kind.count):
                pinned = tuple(islice(cores, layout.ranks)) if self.settings.deployment.pin_cores else ()
                node = node_name(kind.role, index)
                specs.append(NodeSpec(node, kind.role, self.settings, self.model_path, layout, pinned))
        return specs

    def _actor(self, cls: type, name: str, **options: Any) -> Any:
        threads = str(self.settings.engine.threads)
        return ray.remote(cls).options(
            name=name,
            namespace=NAMESPACE,
            max_restarts=-1,
            max_concurrency=10_000,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}},
            **options,
        )

    def _await_nodes(self, update: Any) -> None:
        waiting = {handle.card.remote(): node for node, handle in self.nodes.items()}
        deadline = time.monotonic() + START_S
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                raise PdserveError(f"not started within {START_S:.0f} s: {', '.join(waiting.values())}")
            for ref in done:
                node = waiting.pop(ref)
                try:
                    ray.get(ref)
                except RayError as error:
                    raise _start_error(node, error) from error
                update(f"{len(self.nodes) - len(waiting)} of {len(self.nodes)}")

    def _check_providers(self) -> None:
        """No silent slow path: what was asked for and is not to be had is said now."""
        wanted = self.settings.transport.provider
        for node, card in self.cards().items():
            self._remember(card)
            lacks = card.role is not Role.COLOCATED and (not card.providers if wanted == "auto" else True)
            if lacks and wanted not in card.providers:
                there = ", ".join(card.providers) or "none"
                raise ConfigError(f"transport.provider: {wanted!r} is not to be had at {node} (to be had: {there})")

    def _remember(self, card: NodeCard) -> None:
        """To wait for its end and clear up after it: where it runs on this host."""
        if card.host == host_identity():
            self._pids.add(card.pid)

    def _await_health(self, update: Any) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            ready, summary = ray.get(self.scheduler.health.remote())
            snapshots = ray.get(self.scheduler.nodes.remote())
            if ready and {s.node_id for s in snapshots} == self.nodes.keys() and all(s.usable for s in snapshots):
                return
            update(summary)
            if time.monotonic() > deadline:
                raise PdserveError(f"no transfer succeeded within {READY_S:.0f} s: {summary}")
            time.sleep(0.1)

    def _serve(self) -> None:
        from ray import serve  # 2 s that a cluster without HTTP need not wait for

        from actors.ingress import IngressSpec, ingress_application

        http = self.settings.http
        port = http.port or _free_port(http.host)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        # What others have started is theirs; what runs in a Ray of our own ends with it.
        self._leave_serve = self.settings.ray_address is None or bool(serve.status().proxies)
        serve.start(proxy_location="HeadOnly", http_options={"host": http.host, "port": port})
        spec = IngressSpec(self.model_path, self.model_name, self.max_model_len)
        serve.run(ingress_application(spec), name=APPLICATION, route_prefix="/")
        host = f"[{http.host}]" if ":" in http.host else http.host
        self.url = f"http://{host}:{port}"

    def wait(self) -> None:
        """Until the process is told to end; says when the cluster stops being able to serve, and when it can again."""
        before = True
        while True:
            time.sleep(WATCH_S)
            try:
                ready, summary = ray.get(self.scheduler.health.remote(), timeout=WATCH_TIMEOUT_S)
            except RayError as error:
                ready, summary = False, f"the global scheduler does not answer ({type(error).__name__})"
            if ready != before:
                (_log.info if ready else _log.warning)("%s: %s", "ready again" if ready else "not ready", summary)
                before = ready

    def cards(self) -> dict[NodeId, NodeCard]:
        return {node: ray.get(handle.card.remote()) for node, handle in self.nodes.items()}

    def trace(self, request_id: RequestId) -> HandoffTrace | None:
        """What the decode nodes know of a request's handoff; None if nothing (any more)."""
        decode = [handle for node, handle in self.nodes.items() if node.startswith(Role.DECODE)]
        return next(filter(None, ray.get([handle.trace.remote(request_id) for handle in decode])), None)

    def metrics(self) -> dict[NodeId, dict[str, float]]:
        return {node: ray.get(handle.metrics.remote()) for node, handle in self.nodes.items()}

    def close(self) -> None:
        """Ends HTTP first, then the nodes in order, then the Ray that was started here. Idempotent."""
        with contextlib.suppress(KeyboardInterrupt):
            if self.scheduler is not None and ray.is_initialized():
                self._close_nodes()
        self.nodes, self.scheduler = {}, None
        node_handle.cache_clear()
        self._ray.close()
        until = time.monotonic() + ENDED_S
        for pid in self._pids:
            _wait_for_end(pid, until)
            with contextlib.suppress(ValueError, OSError):  # of nodes that were killed
                remove_leftovers(pid)

    def _close_nodes(self) -> None:
        if self.url:
            from ray import serve

            _quietly(partial(serve.delete, APPLICATION) if self._leave_serve else serve.shutdown)
        with contextlib.suppress(RayError):  # restarted nodes have new pids
            cards = ray.get([handle.card.remote() for handle in self.nodes.values()], timeout=CARDS_S)
            for card in cards:
                self._remember(card)
        if closing := [handle.close.remote() for handle in self.nodes.values()]:
            with contextlib.suppress(RayError, GetTimeoutError):
                ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        for handle in [*self.nodes.values(), self.scheduler]:
            _quietly(partial(ray.kill, handle, no_restart=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def launch(settings: Settings, *, http: bool = True) -> Cluster:
    """Starts everything and returns when a request would be served.

    Raises ConfigError, ModelError, PdserveError; then nothing is left running.
    """
    return Cluster(settings, http=http)


def _start_error(node: NodeId, error: RayError) -> PdserveError:
    """Ray's text of a constructor that failed ends with the exception itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return PdserveError(f"{node} did not start: {lines[-1] if lines else type(error).__name__}")


def _check_ranks(config: ModelConfig, deployment: Deployment) -> None:
    """Before processes are started for them. Raises ModelError, ConfigError."""
    for kind in deployment.kinds:
        check_ranks(config, kind.parallel.tp)
        if kind.ep and config.experts is None:
            raise ConfigError(f"deployment.{kind.role}.ep: {config.name} has no experts to share out; leave ep false")
        if kind.rank.gpus:
            _log.warning("deployment.%s.gpus: GPUs are set aside, but the engine computes on CPUs for now", kind.role)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _quietly(call: Any) -> None:
    try:
        call()
    except Exception as error:
        _log.debug("while closing: %s", error)


def _wait_for_end(pid: int, until: float) -> None:
    """A process that has closed its memory a moment ago may still be on its way out."""
    while time.monotonic() < until and Path(f"/proc/{pid}").exists():
        time.sleep(0.02)
