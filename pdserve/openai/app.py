"""The HTTP application: which path is answered by whom."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from pdserve import __version__
from pdserve.openai import http_metrics, prompts
from pdserve.openai.backend import Backend, Health
from pdserve.openai.disconnect import ClientGone
from pdserve.openai.envelope import RequestEnvelope
from pdserve.openai.errors import ApiError, as_api_error, bad_request
from pdserve.openai.http_metrics import HttpMetrics
from pdserve.openai.requests import DetokenizeRequest, TokenizeRequest, parse_body
from pdserve.openai.responses import DetokenizeAnswer, ModelCard, ModelList, TokenizeAnswer
from pdserve.openai.service import GenerationService
from pdserve.text import Tokenizer

_log = logging.getLogger(__name__)
_NODES_ANSWER_S = 5.0  # for /health and /metrics: an answer that hangs says less than one that says so
_CLIENT_GONE = 499  # nobody reads it; nginx's number, for access logs
Handler = Callable[[Request], Awaitable[Response]]


def build_app(backend: Backend, tokenizer: Tokenizer, *, metrics: HttpMetrics | None = None) -> FastAPI:
    """An ASGI application with OpenAI's API. Build it in the process that serves it: metrics cannot be pickled."""
    metrics = metrics or HttpMetrics()
    generation = GenerationService(backend, tokenizer, metrics)
    models = ModelEndpoints(backend)
    tokens = TokenEndpoints(backend, tokenizer, generation)
    server = ServerEndpoints(backend, metrics)
    app = FastAPI(title="pdserve", version=__version__, openapi_url=None)
    app.add_middleware(RequestEnvelope)
    app.add_exception_handler(HTTPException, _http_error)
    routes: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/chat/completions", generation.chat),
        ("POST", "/v1/completions", generation.completion),
        ("GET", "/v1/models", models.all),
        ("GET", "/v1/models/{model:path}", models.one),
        ("POST", "/tokenize", tokens.tokenize),
        ("POST", "/detokenize", tokens.detokenize),
        ("GET", "/health", server.health),
        ("GET", "/metrics", server.metrics),
        ("GET", "/version", server.version),
    ]
    for method, path, handler in routes:
        app.add_route(path, _guarded(handler), methods=[method])
    return app


class ModelEndpoints:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._created = int(time.time())

    def _card(self) -> ModelCard:
        backend = self._backend
        return ModelCard(id=backend.model_name, created=self._created, max_model_len=backend.max_model_len)

    async def all(self, request: Request) -> Response:
        return _json(ModelList(data=[self._card()]))

    async def one(self, request: Request) -> Response:
        card, asked = self._card(), request.path_params["model"]
        if asked != card.id:
            message = f"the model {asked!r} does not exist; this server has {card.id!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return _json(card)


class TokenEndpoints:
    def __init__(self, backend: Backend, tokenizer: Tokenizer, generation: GenerationService) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._generation = generation

    async def tokenize(self, request: Request) -> Response:
        body = parse_body(TokenizeRequest, await request.body())
        self._generation.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if body.messages is not None:
            tokens = await prompts.chat_prompt(self._tokenizer, body.messages)
        else:
            tokens = await prompts.encode(self._tokenizer, body.prompt or "", body.add_special_tokens)
        return _json(TokenizeAnswer(tokens=tokens, count=len(tokens), max_model_len=self._backend.max_model_len))

    async def detokenize(self, request: Request) -> Response:
        body = parse_body(DetokenizeRequest, await request.body())
        self._generation.check_model(body.model)
        prompts.check_tokens(self._tokenizer, body.tokens, "tokens")
        return _json(DetokenizeAnswer(prompt=self._tokenizer.decode(body.tokens, skip_special=False)))


class ServerEndpoints:
    def __init__(self, backend: Backend, metrics: HttpMetrics) -> None:
        self._backend = backend
        self._metrics = metrics

    async def health(self, request: Request) -> Response:
        """200 only when ready; else 503, and the detail says what is missing."""
        try:
            async with asyncio.timeout(_NODES_ANSWER_S):
                health = await self._backend.health()
        except TimeoutError:
            health = Health(False, {"error": f"the nodes did not answer within {_NODES_ANSWER_S} s"})
        except Exception as error:
            _log.exception("the health check failed")
            health = Health(False, {"error": str(error)})
        status = "ready" if health.ready else "unavailable"
        return JSONResponse({"status": status, "detail": health.detail}, 200 if health.ready else 503)

    async def metrics(self, request: Request) -> Response:
        text = self._metrics.text()
        try:
            async with asyncio.timeout(_NODES_ANSWER_S):
                text += await self._backend.metrics_text()
        except Exception:  # our own metrics are worth having when the nodes are in trouble
            _log.exception("the nodes' metrics are not to be had")
        return Response(text, media_type=http_metrics.CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def _guarded(handler: Handler) -> Handler:
    """Every error leaves in OpenAI's shape, and is counted."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=_CLIENT_GONE)
        except Exception as error:
            api_error = as_api_error(error, request.state.request_id)
            if hasattr(request.state, "meter"):
                request.state.meter.outcome = api_error.outcome
            return api_error.response()

    return answer


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return ApiError(error.status_code, message, headers=error.headers or {}).response()
