"""The HTTP face: OpenAI's API as a Ray Serve deployment, and the backend that turns its requests into nodes' work.

Nothing about KV is known here. A replica keeps one long-lived stream per decode node. When a decode node dies, what it
was generating continues elsewhere: prompt and streamed tokens become a new prompt.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayTaskError

from actors.global_scheduler import Placement
from actors.metrics import node_metrics_text
from actors.names import node_handle, scheduler_handle
from pdserve.errors import NoNodeAvailable, PdserveError
from pdserve.openai.app import build_app
from pdserve.openai.backend import Health
from pdserve.text import Tokenizer
from pdserve.types import FinishReason, GenerationRequest, NodeId, RequestId, SequenceOutput

_log = logging.getLogger(__name__)

RENEW_S = 10.0
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
        lost: set[NodeId] = set()
        while len(lost) < DECODE_ATTEMPTS:
            rest = _continued(request, streamed)
            placement = await self._pick(rest, frozenset(lost))
            node, ended = placement.decode, False
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
                ended = True
                lost.add(node)
                _log.warning("%s was lost; %s goes on elsewhere", node, request.request_id)
            except PdserveError:
                ended = True  # the node has refused it
                raise
            finally:
                self._outputs.pop(rest.request_id, None)
                self._home.pop(rest.request_id, None)
                if not ended:  # the client has gone, or has enough
                    node_handle(node).cancel.remote(rest.request_id)
        error = f"{len(lost)} decode nodes were lost under this request"
        yield SequenceOutput(request.request_id, (), FinishReason.ERROR, error)

    async def _pick(self, request: GenerationRequest, lost: frozenset[NodeId]) -> Placement:
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
        self._reader(placement.decode)
        try:
            await node_handle(placement.decode).submit.remote(self._replica, request, placement.prefill)
        except RayActorError as error:
            self._lose(placement.decode)
            raise _NodeGone from error
        except RayTaskError as error:
            raise _cause(error) from error

    async def _read(self, request_id: RequestId) -> AsyncGenerator[SequenceOutput, None]:
        queue = self._outputs[request_id]
        while True:
            output = await queue.get()
            if isinstance(output, _NodeGone):
                raise output
            yield output
            if output.finish is not None:
                return

    # ------------------------------------------------ one stream per decode node

    def _reader(self, node: NodeId) -> None:
        if node not in self._readers:
            self._readers[node] = asyncio.create_task(self._read_node(node))

    async def _read_node(self, node: NodeId) -> None:
        renewing = asyncio.create_task(self._renew(node))
        try:
            stream = node_handle(node).outputs.options(num_returns="streaming").remote(self._replica)
            async for item in stream:
                for output in await item:
                    queue = self._outputs.get(output.request_id)
                    if queue is not None:
                        queue.put_nowait(output)
        except (RayActorError, RayTaskError) as error:
            _log.warning("the stream of %s broke: %s", node, type(error).__name__)
            self._lose(node)
        finally:
            renewing.cancel()
            self._readers.pop(node, None)

    async def _renew(self, node: NodeId) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            node_handle(node).renew.remote(self._replica)

    def _lose(self, node: NodeId) -> None:
        self._scheduler.lost.remote(node)
        for request_id in [r for r, home in self._home.items() if home == node]:
            self._outputs[request_id].put_nowait(_NodeGone())

    # ------------------------------------------------ health and metrics

    async def health(self) -> Health:
        ready, nodes = await self._scheduler.health.remote()
        return Health(ready, {"nodes": nodes})

    async def metrics_text(self) -> str:
        nodes = [snapshot.node_id for snapshot in await self._scheduler.nodes.remote()]
        answers = await asyncio.gather(
            *(asyncio.wait_for(node_handle(node).metrics.remote(), 2) for node in nodes), return_exceptions=True
        )
        return node_metrics_text({n: a for n, a in zip(nodes, answers, strict=True) if isinstance(a, dict)})


def _continued(request: GenerationRequest, streamed: list[int]) -> GenerationRequest:
    """The rest of a request whose decode node was lost: nothing is streamed twice."""
    if not streamed:
        return request
    sampling = replace(
        request.sampling,
        max_tokens=request.sampling.max_tokens - len(streamed),
        min_tokens=max(0, request.sampling.min_tokens - len(streamed)),
    )
    request_id = RequestId(f"{request.request_id}+{len(streamed)}")
    return GenerationRequest(request_id, (*request.prompt, *streamed), sampling)


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
