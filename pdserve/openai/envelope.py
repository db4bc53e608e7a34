"""Around every HTTP request: its id in and out, and the end of its measurement."""

from __future__ import annotations

import re
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = "X-Request-Id"
_ACCEPTABLE = re.compile(r"[\x21-\x7e]{1,128}")


class RequestEnvelope:
    """ASGI middleware. Puts `request_id` into the request's state; closes its `meter` when the last byte is out.

    The id is the client's where it gave an acceptable one. It is for logs: two requests may carry the same.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(_HEADER, "")
        request_id = given if _ACCEPTABLE.fullmatch(given) else uuid.uuid4().hex
        state: dict[str, Any] = {**scope.get("state", {}), "request_id": request_id}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_HEADER] = request_id
            await send(message)

        try:
            await self._app({**scope, "state": state}, receive, send_with_id)
        finally:
            if "meter" in state:
                state["meter"].close()
