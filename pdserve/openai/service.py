"""The endpoints' work: from a parsed body to an answer, whole or streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from pdserve.openai import prompts
from pdserve.openai.backend import Backend
from pdserve.openai.disconnect import while_connected
from pdserve.openai.errors import ApiError, as_api_error, bad_request
from pdserve.openai.generation import answer, merged
from pdserve.openai.http_metrics import HttpMetrics, RequestMeter
from pdserve.openai.requests import ChatCompletionRequest, CompletionRequest, SamplingBody, parse_body
from pdserve.openai.responses import Finish, Usage
from pdserve.openai.shapes import AnswerHead, AnswerShape, ChatShape, ChoiceText, CompletionShape
from pdserve.openai.sse import DONE, SseResponse, sse_event
from pdserve.text import TextDelta, Tokenizer
from pdserve.types import GenerationRequest, RequestId


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request, ready to run: a sequence per choice, and the shape of its answer."""

    sequences: list[GenerationRequest]
    shape: AnswerShape
    include_usage: bool
    continues: bool
    """The answer's text goes on from the prompt's."""
    meter: RequestMeter

    @property
    def prompt_tokens(self) -> int:
        return sum(len(sequence.prompt) for sequence in self.sequences)


class GenerationService:
    """/v1/chat/completions and /v1/completions."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, metrics: HttpMetrics) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def chat(self, request: Request) -> Response:
        meter = self._measured(request)
        body = parse_body(ChatCompletionRequest, await request.body())
        self.check_model(body.model)
        asked = prompts.chat_max_tokens(body)
        prompt = await prompts.chat_prompt(self._tokenizer, body.messages)
        if not prompt:
            raise bad_request("messages make an empty prompt: the chat template gave no tokens", "messages")
        limit = prompts.answer_limit(len(prompt), asked, self._backend.max_model_len)
        head = self._head("chatcmpl", body)
        sampling = prompts.sampling_params(body, limit)
        sequence = GenerationRequest(RequestId(head.id), tuple(prompt), sampling)
        return await self._run(request, body, Job([sequence], ChatShape(head), head.include_usage, False, meter))

    async def completion(self, request: Request) -> Response:
        meter = self._measured(request)
        body = parse_body(CompletionRequest, await request.body())
        self.check_model(body.model)
        head = self._head("cmpl", body)
        sequences = []
        for index, prompt in enumerate(await prompts.completion_prompts(self._tokenizer, body)):
            limit = prompts.answer_limit(
                len(prompt), body.max_tokens, self._backend.max_model_len, prompts.COMPLETION_DEFAULT_TOKENS
            )
            sampling = prompts.sampling_params(body, limit)
            sequences.append(GenerationRequest(RequestId(f"{head.id}-{index}"), tuple(prompt), sampling))
        return await self._run(request, body, Job(sequences, CompletionShape(head), head.include_usage, True, meter))

    def check_model(self, model: str | None) -> None:
        """Raises ApiError (404) unless `model` is the one served, or left to us."""
        if model is not None and model != self._backend.model_name:
            message = f"the model {model!r} does not exist; this server has {self._backend.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _measured(self, request: Request) -> RequestMeter:
        meter = self._metrics.start(request.url.path)
        request.state.meter = meter
        return meter

    def _head(self, kind: str, body: SamplingBody) -> AnswerHead:
        """The id is ours, never the client's: two requests may carry the same X-Request-Id."""
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        name, model = f"{kind}-{uuid.uuid4().hex}", self._backend.model_name
        return AnswerHead(name, int(time.time()), model, include_usage, bool(body.return_token_ids))

    async def _run(self, request: Request, body: SamplingBody, job: Job) -> Response:
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        job.meter.prompt(job.prompt_tokens)
        if not body.stream:
            return await while_connected(request.receive, self._whole(job))

        def on_error(error: Exception) -> ApiError:
            api_error = as_api_error(error, request.state.request_id)
            job.meter.outcome = api_error.outcome
            return api_error

        return SseResponse(self._events(job), on_error)

    async def _whole(self, job: Job) -> Response:
        texts: list[list[str]] = [[] for _ in job.sequences]
        tokens: list[list[int]] = [[] for _ in texts]
        finishes: list[Finish | None] = [None] * len(texts)
        async with aclosing(self._deltas(job)) as deltas:
            async for index, delta in deltas:
                tokens[index].extend(delta.tokens)
                texts[index].append(delta.text)
                finishes[index] = _finish(delta)
        choices = [
            ChoiceText(index, "".join(texts[index]), finish, tuple(tokens[index]))
            for index, finish in enumerate(finishes)
        ]
        whole = job.shape.whole(choices, Usage.of(job.prompt_tokens, sum(map(len, tokens))))
        return Response(whole.model_dump_json(exclude_unset=True), media_type="application/json")

    async def _events(self, job: Job) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        generated = 0
        async with aclosing(self._deltas(job)) as deltas:
            async for index, delta in deltas:
                generated += len(delta.tokens)
                if delta.text or delta.finish or job.shape.head.token_ids:
                    choice = ChoiceText(index, delta.text, _finish(delta), delta.tokens, first=index not in begun)
                    begun.add(index)
                    yield sse_event(job.shape.chunk(choice))
        if job.include_usage:
            yield sse_event(job.shape.usage_chunk(Usage.of(job.prompt_tokens, generated)))
        yield DONE

    async def _deltas(self, job: Job) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """All sequences' deltas, measured."""
        answers = [
            answer(self._backend, self._tokenizer, sequence, continues=job.continues) for sequence in job.sequences
        ]
        finish: Finish | None = None
        async with aclosing(merged(answers)) as deltas:
            async for index, delta in deltas:
                job.meter.output(index, len(delta.tokens))
                finish = _finish(delta) or finish
                yield index, delta
        job.meter.outcome = cast(Finish, finish)


def _finish(delta: TextDelta) -> Finish | None:
    """Failures never get here: they are errors."""
    return None if delta.finish is None else cast(Finish, delta.finish.value)
