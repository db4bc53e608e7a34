"""A terminal chat with a running server, over its OpenAI API. The standard library is enough for that."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO
from urllib.parse import urlsplit

from pdserve.errors import PdserveError

GREETING = "Chatting with {model} at {url}. /clear forgets the conversation, /exit or Ctrl-D ends it."
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 600.0


@dataclass
class ChatClient:
    """Speaks to one server; keeps the conversation. `url` is the server's root, such as http://127.0.0.1:8000."""

    url: str
    model: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url if "//" in self.url else f"http://{self.url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PdserveError(f"--url: {self.url!r} is not a server's address, for example http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._path = parts.path.rstrip("/").removesuffix("/v1")

    def choose_model(self) -> str:
        """The model asked for, or the server's first. Raises PdserveError where the server has none or not this one."""
        with self._request("GET", "/v1/models", None, CONNECT_TIMEOUT_S) as answer:
            names = [entry["id"] for entry in json.loads(answer.read())["data"]]
        if self.model is None and names:
            self.model = names[0]
        if self.model is None or self.model not in names:
            raise PdserveError(f"{self.url} serves {', '.join(names) or 'no model'}, not {self.model}")
        return self.model

    def ask(self, text: str) -> Iterator[str]:
        """Yields the answer's deltas; remembers question and answer once the answer is complete."""
        asked = [*self.messages, {"role": "user", "content": text}]
        body = {"model": self.model, "messages": asked, "stream": True}
        said = []
        with self._request("POST", "/v1/chat/completions", body, ANSWER_TIMEOUT_S) as answer:
            for event in _events(answer):
                if "error" in event:
                    raise PdserveError(f"the server ended the answer: {_error_text(event)}")
                for choice in event.get("choices", ()):
                    delta = choice["delta"].get("content") or ""
                    said.append(delta)
                    yield delta
        self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    def _request(self, method: str, path: str, body: Any, timeout_s: float) -> http.client.HTTPResponse:
        secure = self.url.startswith("https:")
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self.url.split("//")[1], timeout=timeout_s)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        try:
            connection.request(method, self._path + path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise PdserveError(
                f"no server answers at {self.url} ({error}); start one with `pdserve serve`, or name another with --url"
            ) from error
        if answer.status != 200:
            with answer:
                raise PdserveError(f"{self.url} answered {answer.status}: {_error_text(_json_or_text(answer.read()))}")
        return answer


def run_chat(url: str, model: str | None, read: Callable[[str], str] = input, out: TextIO | None = None) -> None:
    """Reads questions with `read` until EOF and writes the answers to `out` as they come.

    A failed question is reported and the conversation goes on. Raises PdserveError when there is no server at all.
    """
    out = out or sys.stdout
    client = ChatClient(url, model)
    print(GREETING.format(model=client.choose_model(), url=client.url), file=out)
    while True:
        try:
            text = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=out)
            return
        if text == "/exit":
            return
        if text == "/clear":
            client.messages = []
        elif text:
            _print_answer(client, text, out)


def _print_answer(client: ChatClient, text: str, out: TextIO) -> None:
    try:
        for delta in client.ask(text):
            print(delta, end="", flush=True, file=out)
        print(file=out)
    except KeyboardInterrupt:
        print("\n(interrupted; this question is forgotten)", file=out)
    except (PdserveError, OSError, http.client.HTTPException) as error:
        print(f"\n({error})", file=out)


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Server-sent events as objects. Raises PdserveError when the stream ends without its `[DONE]` or an error."""
    failed = False
    for line in answer:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        failed = failed or "error" in event
        yield event
    if not failed:
        raise PdserveError("the server closed the connection before the answer was complete")


def _json_or_text(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")[:200]


def _error_text(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
