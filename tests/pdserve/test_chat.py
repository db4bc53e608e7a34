"""The terminal chat against a real HTTP server that speaks the wire format of /v1/chat/completions."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pdserve.chat import run_chat
from pdserve.errors import PdserveError


class EchoHandler(BaseHTTPRequestHandler):
    """Answers with the questions heard so far. `refuse`, `break` and `cut` name three ways to fail."""

    def do_GET(self) -> None:
        self.answer(200, "application/json", json.dumps({"data": [{"id": "echo"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        questions = [message["content"] for message in body["messages"] if message["role"] == "user"]
        if questions[-1] == "refuse":
            self.answer(400, "application/json", json.dumps({"error": {"message": "prompt too long"}}).encode())
            return
        events: list[Any] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        events += [{"choices": [{"delta": {"content": f"<{text}>"}}]} for text in questions]
        if questions[-1] == "break":
            events.append({"error": {"message": "the prefill node was lost"}})
        stream = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
        self.answer(
            200, "text/event-stream", (stream + ("" if questions[-1] == "cut" else "data: [DONE]\n\n")).encode()
        )

    def answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), EchoHandler) as server:
        thread = threading.Thread(target=server.serve_forever, name="echo server")
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def converse(url: str, *lines: str, model: str | None = None) -> list[str]:
    waiting = iter(lines)

    def read(_: str) -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    out = io.StringIO()
    run_chat(url, model, read, out)
    return out.getvalue().splitlines()[1:]


def test_answers_stream_and_the_conversation_is_kept(url: str) -> None:
    assert converse(url, "你好", "👋🏽", "/exit", "never") == ["<你好>", "<你好><👋🏽>"]


def test_clear_forgets(url: str) -> None:
    assert converse(url, "one", "/clear", "", "two") == ["<one>", "<two>", ""]


@pytest.mark.parametrize(
    ("question", "told"),
    [
        ("refuse", "answered 400: prompt too long"),
        ("break", "the prefill node was lost"),
        ("cut", "closed the connection before the answer was complete"),
    ],
)
def test_a_failed_question_is_told_and_forgotten(url: str, question: str, told: str) -> None:
    lines = converse(url, question, "next")
    assert any(told in line for line in lines)
    assert "<next>" in lines


@pytest.mark.parametrize("suffix", ["/", "/v1", "/v1/"])
def test_the_address_may_be_an_openai_base_url(url: str, suffix: str) -> None:
    assert converse(url + suffix, "hi", "/exit") == ["<hi>"]


def test_a_model_that_is_not_served_is_refused(url: str) -> None:
    with pytest.raises(PdserveError, match="serves echo, not gpt"):
        converse(url, model="gpt")


def test_a_wrong_address_is_refused() -> None:
    with pytest.raises(PdserveError, match="is not a server's address"):
        converse("ftp://somewhere")
