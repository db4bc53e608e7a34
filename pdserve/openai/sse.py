"""Server-sent events: how an answer is streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.openai.disconnect import ClientGone, while_connected
from pdserve.openai.errors import ApiError

DONE = b"data: [DONE]\n\n"


def sse_event(body: BaseModel) -> bytes:
    return b"data: " + body.model_dump_json(exclude_unset=True).encode() + b"\n\n"


class SseResponse(Response):
    """Sends events as they come. The status waits for the first: an error before it is an ordinary error answer.

    An error after it is an error event, and no `[DONE]` follows, so that a broken answer never looks complete. When
    the client disconnects, `events` is closed at once.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], on_error: Callable[[Exception], ApiError]) -> None:
        # The second header keeps reverse proxies from holding tokens back.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._run(scope, receive, send))
        except ClientGone:
            pass
        finally:
            await self._events.aclose()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """All in one task, as generators may hold timeouts or scopes that belong to a task."""
        async with aclosing(self._events) as events:
            try:
                first = await anext(events)
            except Exception as error:
                await self._on_error(error).response()(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await _send_body(send, first)
            try:
                async for event in events:
                    await _send_body(send, event)
            except Exception as error:
                await _send_body(send, sse_event(self._on_error(error).body()))
            await _send_body(send, b"", more=False)


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
