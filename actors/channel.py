"""The messenger's control channels, carried by Ray calls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from ray.exceptions import ActorDiedError

from actors.names import node_handle
from pdserve.messenger.wire import MeetCallback, MeetRequest, ToDecode, ToPrefill
from pdserve.types import NodeId

_log = logging.getLogger(__name__)

OnLost = Callable[[NodeId, str], None]


class RayChannel:
    """Towards one replica, by its address. Nothing here blocks; a message to an actor that is gone is reported to
    `on_lost`.
    """

    def __init__(self, address: NodeId, on_lost: OnLost) -> None:
        self._address = address
        self._on_lost = on_lost

    def meet(self, request: MeetRequest, on_reply: MeetCallback) -> None:
        self._call("meet", request).add_done_callback(
            lambda future: on_reply(future.exception() or future.result())  # type: ignore[arg-type]
        )

    def send(self, message: ToPrefill | ToDecode) -> None:
        self._call("control", message).add_done_callback(partial(self._sent, message))

    def _call(self, method: str, argument: Any) -> Future[Any]:
        future: Future[Any]
        try:
            future = getattr(node_handle(self._address), method).remote(self._address, argument).future()
        except ValueError as error:  # no such actor
            future = Future()
            future.set_exception(error)
        return future

    def _sent(self, message: object, future: Future[Any]) -> None:
        error = future.exception()
        # One that is unavailable may be back in a moment: the message is lost, and deadlines see to the rest.
        if isinstance(error, ActorDiedError):
            self._on_lost(self._address, "its actor has died")
        elif error is not None:
            _log.warning("%s to %s was not delivered: %s", type(message).__name__, self._address, error)
