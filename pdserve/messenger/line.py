"""Control messages over a link, both ways, and what is watched about the link itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from pdserve.messenger.codec import Message, Unreadable, decode, encode
from transport.api import Link
from transport.errors import TransportError

_log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


def send(message: M, link: Link, aside: Callable[[M], None]) -> None:
    """By the link; what it does not take (it is closed or full, or the message too large) goes `aside`.

    A message that the link has taken may still be lost with it: the protocol's deadlines see to that.
    """
    try:
        link.send(encode(message))
    except TransportError as error:
        _log.info("%s of %s goes aside: %s", type(message).__name__, message.id, error)
        aside(message)
    except Exception:  # as if it had been lost on the way
        _log.exception("%s of %s was not sent", type(message).__name__, message.id)


class Intake(Generic[M]):
    """Reads what comes by links. What is no message of ours, or of the other direction, is logged and counted."""

    def __init__(self, *kinds: type[M]) -> None:
        self._kinds = kinds
        self.unreadable = 0

    def read(self, data: bytes, peer: str) -> M | None:
        try:
            message = decode(data)
            if isinstance(message, self._kinds):
                return message
            raise Unreadable(f"{type(message).__name__} is nothing that a peer tells this side")
        except Unreadable as error:
            self.unreadable += 1
            _log.error("dropped what %s has sent: %s", peer, error)
            return None


class LostPaths:
    """Tells once of each pair of NICs that a link has lost while it goes on with the others."""

    def __init__(self) -> None:
        self._told = 0

    def look(self, peer: str, link: Link) -> None:
        lost = link.lost_paths
        for path in lost[self._told :]:
            _log.warning("the link to %s goes on without %s", peer, path)
        self._told = len(lost)
