"""A backend that says what the test told it to, and a real server around it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn

from pdserve.openai import Health, build_app
from pdserve.text import Tokenizer
from pdserve.types import FinishReason, GenerationRequest, RequestId, SequenceOutput
from tests.pdserve.text.small_tokenizers import CHATML, CORES

MODEL = "tiny/model"
TOKENIZER = Tokenizer(
    CORES["byte_level"], chat_template=CHATML, special={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
)
EOS = 2


@dataclass
class ScriptedBackend:
    """Answers every request with `reply` and an end-of-sequence token, as far as `max_tokens` goes."""

    model_name: str = MODEL
    max_model_len: int = 200
    reply: str = "ZEBRA QUIZ"
    step_tokens: int = 1
    pause_s: float = 0.0
    error_at: int | None = None
    """Output before which `error` is raised, or sent when it is a SequenceOutput's error text."""
    error: Exception | str = "the node died"
    ends_early: bool = False
    ready: bool = True
    metrics: str = "pdserve:node_up 1\n"
    requests: list[GenerationRequest] = field(default_factory=list)
    outputs: int = 0
    running: int = 0
    cancelled: list[RequestId] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[SequenceOutput, None]:
        self.requests.append(request)
        self.running += 1
        ended = False
        try:
            for index, output in enumerate(self._outputs(request)):
                if index == self.error_at:
                    if isinstance(self.error, Exception):
                        raise self.error
                    yield SequenceOutput(request.request_id, (), FinishReason.ERROR, self.error)
                await asyncio.sleep(self.pause_s)
                self.outputs += 1
                ended = output.finish is not None
                yield output
        finally:
            await asyncio.sleep(0)  # a real backend awaits here too: it tells its nodes
            self.running -= 1
            if not ended:
                self.cancelled.append(request.request_id)

    def _outputs(self, request: GenerationRequest) -> Iterator[SequenceOutput]:
        tokens = [*TOKENIZER.encode(self.reply), EOS]
        finish = FinishReason.STOP if len(tokens) <= request.sampling.max_tokens else FinishReason.LENGTH
        tokens = tokens[: request.sampling.max_tokens]
        for start in range(0, len(tokens), self.step_tokens):
            last = start + self.step_tokens >= len(tokens) and not self.ends_early
            step = tuple(tokens[start : start + self.step_tokens])
            yield SequenceOutput(request.request_id, step, finish if last else None)

    async def health(self) -> Health:
        return Health(self.ready, {"prefill": 1, "decode": int(self.ready)})

    async def metrics_text(self) -> str:
        return self.metrics

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


@dataclass(frozen=True)
class Served:
    backend: ScriptedBackend
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serving(backend: ScriptedBackend) -> Iterator[Served]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_app(backend, TOKENIZER), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http-server")
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Served(backend, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()
    assert not thread.is_alive()


def wait_until(condition: object, timeout_s: float = 5.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)
