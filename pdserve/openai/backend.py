"""What the HTTP surface asks of whoever generates the tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

from pdserve.types import GenerationRequest, SequenceOutput


@dataclass(frozen=True, slots=True)
class Health:
    """`detail` says what is there and, when not ready, what is missing; it is sent to the asker as JSON."""

    ready: bool
    detail: dict[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """Everything runs in the event loop of the HTTP server."""

    @property
    def model_name(self) -> str:
        """What requests call the model."""
        ...

    @property
    def max_model_len(self) -> int:
        """Context in tokens: prompt and answer together."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[SequenceOutput, None]:
        """The outputs of one request as they come; the last one carries `finish`.

        Closing the generator cancels the request, and so does cancelling the task that waits on it; both must be
        prompt, and closing after `finish` is no cancel. `request.sampling.stop` is the caller's business: it watches
        the text and closes. Raises RequestError (400), NoNodeAvailable or OutOfPages (503), other errors (500).
        """
        ...

    async def health(self) -> Health: ...

    async def metrics_text(self) -> str:
        """Metrics of the nodes in Prometheus' text format, appended to the HTTP surface's own."""
        ...
