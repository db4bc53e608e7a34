"""The HTTP face: OpenAI's API as a Ray Serve deployment, and the backend that turns its requests into nodes' work.

Nothing about KV is known here. A replica keeps one long-lived stream per decode node. When a decode node dies, what it
was generating continues elsewhere: prompt and streamed tokens become a new prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.global_scheduler import Placement
from actors.metrics import node_metrics_text
from actors.names import node_handle, node_of, scheduler_handle
from pdserve.errors import NoNodeAvailable, PdserveError
from pdserve.openai.app import build_app
from pdserve.openai.backend import Health
from pdserve.text import Tokenizer
from pdserve.types import FinishReason, GenerationRequest, Incarnation, NodeId, RequestId, SequenceOutput

_log = logging.getLogger(__name__)

RENEW_S = 5.0
ABSENT_CHECKS = 3  # a node that has not been in the scheduler's list for so many in a row is lost
DECODE_ATTEMPTS = 3
PICK_PATIENCE_S = 10.0  # for nodes that are being restarted
PICK_PAUSE_S = 0.25


class _NodeGone(Exception):
    """The decode node of a request cannot be reached any more."""


@dataclass(frozen=True, slots=True)
class IngressSpec:
    model_path: str
    model_name: str
    max_model_len: int


class RayBackend:
    """Implements `pdserve.openai.backend.Backend` over the actors. Lives in one event loop."""

    def __init__(self, spec: IngressSpec) -> None:
        self.model_name = spec.model_name
        self.max_model_len = spec.max_model_len
        self._replica = f"ingress-{secrets.token_hex(8)}"
        self._scheduler = scheduler_handle()
        self._outputs: dict[RequestId, asyncio.Queue[SequenceOutput | _NodeGone]] = {}
        self._home: dict[RequestId, NodeId] = {}
        self._readers: dict[NodeId, asyncio.Task[None]] = {}

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[SequenceOutput, None]:
        streamed: list[int] = []
        lost: set[Incarnation] = set()
        while len(lost) < DECODE_ATTEMPTS:
            rest = _continued(request, streamed, attempt=len(lost))
            placement = await self._pick(rest, frozenset(lost))
            node, ended = node_of(placement.decode.node_id), False
            self._outputs[rest.request_id] = asyncio.Queue()
            self._home[rest.request_id] = node
            try:
                await self._submit(rest, placement)
                async for output in self._read(rest.request_id):
                    streamed.extend(output.tokens)
                    ended = output.finish is not None
                    yield replace(output, request_id=request.request_id)
                return
            except _NodeGone:
                lost.add(placement.decode.incarnation)
                _log.warning("%s was lost; %s goes on elsewhere", node, request.request_id)
            except PdserveError:
                ended = True  # the node has refused it
                raise
            finally:
                self._outputs.pop(rest.request_id, None)
                self._home.pop(rest.request_id, None)
                if not ended:  # the client has gone, or has enough, or the node only seemed to be lost
                    _send_quietly(node, "cancel", rest.request_id)
        error = f"{len(lost)} decode nodes were lost under this request; try again"
        yield SequenceOutput(request.request_id, (), FinishReason.ERROR, error, unavailable=True)

    async def _pick(self, request: GenerationRequest, lost: frozenset[Incarnation]) -> Placement:
        """Waits a while for nodes that are being restarted. Raises NoNodeAvailable."""
        patience = time.monotonic() + PICK_PATIENCE_S
        while True:
            try:
                placement: Placement = await self._scheduler.pick.remote(len(request.prompt), lost)
                return placement
            except (RayTaskError, RayActorError) as error:
                cause = _cause(error)
                if not isinstance(cause, NoNodeAvailable) or time.monotonic() > patience:
                    raise cause from error
            await asyncio.sleep(PICK_PAUSE_S)

    async def _submit(self, request: GenerationRequest, placement: Placement) -> None:
        """Raises RequestError, _NodeGone."""
        node = node_of(placement.decode.node_id)
        self._reader(node)
        try:
            await node_handle(node).submit.remote(self._replica, request, placement)
        except (RayActorError, ValueError) as error:
            self._lose(node)
            raise _NodeGone from error
        except RayTaskError as error:
            cause = _cause(error)
            if isinstance(cause, NoNodeAvailable):  # it is closing
                raise _NodeGone from error
            raise cause from error

    async def _read(self, request_id: RequestId) -> AsyncGenerator[SequenceOutput, None]:
        queue = self._outputs[request_id]
        while True:
            output = await queue.get()
            if isinstance(output, _NodeGone):
                raise output
            yield output
            if output.finish is not None:
                return

    def home_of(self, request_id: RequestId) -> NodeId | None:
        """The decode node that a request is at."""
        return self._home.get(request_id)

    # ------------------------------------------------ one stream per decode node

    def _reader(self, node: NodeId) -> None:
        if node not in self._readers:
            self._readers[node] = asyncio.create_task(self._read_node(node))

    async def _read_node(self, node: NodeId) -> None:
        watching = asyncio.create_task(self._watch(node))
        reason = "its stream ended"
        try:
            stream = node_handle(node).outputs.options(num_returns="streaming").remote(self._replica)
            async for item in stream:
                for output in await item:
                    if self._home.get(output.request_id) == node:
                        self._outputs[output.request_id].put_nowait(output)
        except (RayError, ValueError) as error:
            reason = f"its stream broke: {type(error).__name__}"
        finally:
            watching.cancel()
            if self._readers.get(node) is asyncio.current_task():
                del self._readers[node]
        _log.warning("%s: %s", node, reason)
        self._lose(node)  # not when cancelled: then this backend ends, or has lost the node already

    async def _watch(self, node: NodeId) -> None:
        """Renews our lease at the node, and gives up on one that has stopped reporting: Ray does not see it hang."""
        absent = 0
        while True:
            await asyncio.sleep(RENEW_S)
            _send_quietly(node, "renew", self._replica)
            with contextlib.suppress(RayError):
                there = {snapshot.node_id for snapshot in await self._scheduler.nodes.remote()}
                absent = 0 if node in there else absent + 1
            if absent >= ABSENT_CHECKS:
                self._lose(node)
                return

    def _lose(self, node: NodeId) -> None:
        """Every request there goes on elsewhere; the stream is given up, a later request opens a new one."""
        self._scheduler.lost.remote(node)
        reader = self._readers.pop(node, None)
        if reader is not None and reader is not asyncio.current_task():
            reader.cancel()
        for request_id in [r for r, home in self._home.items() if home == node]:
            self._outputs[request_id].put_nowait(_NodeGone())

    # ------------------------------------------------ health and metrics

    async def health(self) -> Health:
        ready, nodes = await self._scheduler.health.remote()
        return Health(ready, {"nodes": nodes})

    async def metrics_text(self) -> str:
        nodes = sorted({snapshot.node_id for snapshot in await self._scheduler.nodes.remote()})
        answers = await asyncio.gather(
            *(asyncio.wait_for(node_handle(node).metrics.remote(), 2) for node in nodes), return_exceptions=True
        )
        return node_metrics_text({n: a for n, a in zip(nodes, answers, strict=True) if isinstance(a, dict)})


def _continued(request: GenerationRequest, streamed: list[int], attempt: int) -> GenerationRequest:
    """The rest of a request whose decode node was lost: nothing is streamed twice, and no id is used twice."""
    if attempt == 0:
        return request
    sampling = replace(
        request.sampling,
        max_tokens=request.sampling.max_tokens - len(streamed),
        min_tokens=max(0, request.sampling.min_tokens - len(streamed)),
    )
    return GenerationRequest(RequestId(f"{request.request_id}~{attempt}"), (*request.prompt, *streamed), sampling)


def _send_quietly(node: NodeId, method: str, argument: str) -> None:
    with contextlib.suppress(ValueError):  # the actor is gone for good
        getattr(node_handle(node), method).remote(argument)


def _cause(error: RayTaskError | RayActorError) -> Exception:
    """Our own errors come back as themselves."""
    if isinstance(error, RayActorError):
        return NoNodeAvailable("the global scheduler is being restarted; try again in a moment")
    cause: Any = error.cause
    return cause if isinstance(cause, PdserveError) else error


class Ingress:
    """The deployment: built in the replica, since tokenizer and metrics cannot be pickled."""

    def __init__(self, spec: IngressSpec) -> None:
        self._spec = spec

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(RayBackend(self._spec), Tokenizer.from_directory(self._spec.model_path))


def ingress_application(spec: IngressSpec) -> Any:
    """The Serve application, to be given to `serve.run`."""
    deployment = serve.deployment(
        name="ingress",
        num_replicas=1,
        max_ongoing_requests=1_000,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=10,
    )(serve.ingress()(Ingress))
    return deployment.bind(spec)
