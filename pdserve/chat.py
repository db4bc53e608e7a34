"""A terminal chat with a running server, over its OpenAI API."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from pdserve.errors import PdserveError
from pdserve.workload.server_client import ServerClient

GREETING = "Chatting with {model} at {url}. /clear forgets the conversation, /exit or Ctrl-D ends it."


class ChatClient:
    """Speaks to one server; keeps the conversation. Raises PdserveError where the server has no such model."""

    def __init__(self, url: str, model: str | None = None, temperature: float = 0.0) -> None:
        self.server = ServerClient(url)
        self.temperature = temperature
        self.messages: list[dict[str, str]] = []
        names = self.server.models()
        self.model = model or next(iter(names), None)
        if self.model is None or self.model not in names:
            raise PdserveError(f"{self.server.url} serves {', '.join(names) or 'no model'}, not {self.model}")

    def ask(self, text: str) -> Iterator[str]:
        """Yields the answer's deltas; remembers question and answer once the answer is complete."""
        asked = [*self.messages, {"role": "user", "content": text}]
        body = {"model": self.model, "messages": asked, "stream": True, "temperature": self.temperature}
        said = []
        for event in self.server.stream("/v1/chat/completions", body):
            for choice in event.get("choices", ()):
                delta = choice["delta"].get("content") or ""
                said.append(delta)
                yield delta
        self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]


def run_chat(
    url: str,
    model: str | None,
    read: Callable[[str], str] = input,
    out: TextIO | None = None,
    temperature: float = 0.0,
) -> None:
    """Reads questions with `read` until EOF and writes the answers to `out` as they come.

    A failed question is reported and the conversation goes on. Raises PdserveError when there is no server at all.
    """
    out = out or sys.stdout
    client = ChatClient(url, model, temperature)
    print(GREETING.format(model=client.model, url=client.server.url), file=out)
    while True:
        try:
            text = read("> " if sys.stdin.isatty() else "").strip()
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
