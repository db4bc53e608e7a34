"""A blocking client of any OpenAI-compatible server: for chat, the demo and load generation."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from pdserve.errors import PdserveError

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 600.0


class ServerClient:
    """Speaks to one server. `url` is its root, such as http://127.0.0.1:8000; safe to use from several threads."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PdserveError(f"--url: {url!r} is not a server's address, for example http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._path = parts.path.rstrip("/").removesuffix("/v1")

    def models(self) -> list[str]:
        """Names of the models served. Raises PdserveError when nobody answers."""
        return [entry["id"] for entry in self.get("/v1/models", CONNECT_TIMEOUT_S)["data"]]

    def get(self, path: str, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        with closing(self._request("GET", path, None, timeout_s)) as answer:
            return json.loads(answer.read())

    def stream(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """Server-sent events as objects. Raises PdserveError on an error event, or when the stream just ends."""
        with closing(self._request("POST", path, body, ANSWER_TIMEOUT_S)) as answer:
            for line in answer:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise PdserveError(f"the server ended the answer: {error_text(event)}")
                yield event
        raise PdserveError("the server closed the connection before the answer was complete")

    def _request(self, method: str, path: str, body: Any, timeout_s: float) -> http.client.HTTPResponse:
        kind = http.client.HTTPSConnection if self.url.startswith("https:") else http.client.HTTPConnection
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
            with closing(answer):
                raise PdserveError(f"{self.url} answered {answer.status}: {error_text(_json_or_text(answer.read()))}")
        return answer


def error_text(answer: Any) -> str:
    """The message of an error body, whatever its shape."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _json_or_text(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")[:200]
