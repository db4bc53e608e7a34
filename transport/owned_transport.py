"""`OwnedTransport`: what the owner of a transport holds, whatever library is beneath. The worker thread does it."""

from __future__ import annotations

import secrets
import threading
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Generic, Self, TypeVar

from transport.api import Memory, OnMessage, SourceRegion
from transport.errors import TransportError
from transport.imm import ImmediateCounters
from transport.inbox import pin
from transport.owned_link import Identity, OwnedLink
from transport.worker import Poller, Worker

W = TypeVar("W", bound=Worker[Any])


class OwnedTransport(ABC, Generic[W]):
    """`transport.api.Transport`, but for what the library decides. A constructor ends with `_begin`."""

    _worker: W

    def __init__(self, provider: str) -> None:
        self._identity = Identity(provider, secrets.randbits(64))
        self._immediates = ImmediateCounters(on_waiting=lambda: self._worker.inbox.nudge())
        self._close_lock = threading.Lock()
        self._closed = False

    def _begin(self, owner: W, cpu: int | None) -> None:
        """Takes the worker over, which is kept on `cpu` from now on. Raises ValueError (no such CPU); all is closed."""
        self._worker = owner
        if cpu is None:
            return
        try:
            pin(owner.inbox, cpu)
        except ValueError:
            self.close()
            raise

    @property
    def provider(self) -> str:
        return self._identity.provider

    @property
    def incarnation(self) -> int:
        return self._identity.incarnation

    @property
    @abstractmethod
    def description(self) -> str: ...

    @property
    @abstractmethod
    def revokes(self) -> bool: ...

    @property
    @abstractmethod
    def receiver_pulls(self) -> bool: ...

    @property
    @abstractmethod
    def max_window(self) -> int: ...

    @property
    def immediates(self) -> ImmediateCounters:
        return self._immediates

    @property
    def error(self) -> TransportError | None:
        return self._worker.error

    @abstractmethod
    def register(self, memory: Memory) -> SourceRegion: ...

    @abstractmethod
    def unregister(self, region: SourceRegion) -> None: ...

    @abstractmethod
    def open_link(self, on_message: OnMessage | None = None) -> OwnedLink[Any]: ...

    def polling(self) -> AbstractContextManager[Poller]:
        """`with transport.polling() as poll:` the calling thread takes the worker's place: the least latency.

        `poll()` runs one turn without waiting: it drains, posts and calls back. `poll.wait(imm, count)` polls until so
        many immediates have come, in compiled code: nothing sees them sooner. What this thread asks of the transport
        runs at once; what others ask waits for the next turn. Raises TransportError where another thread polls.
        """
        return self._worker.polling()

    def stats(self) -> dict[str, int]:
        outbox = self._worker.outbox
        return {
            "writes_posted": outbox.posted,
            "writes_completed": outbox.completed,
            "writes_failed": outbox.failed,
            "bytes_completed": outbox.bytes_completed,
            "immediates_late": self._immediates.late,
            "messages_sent": outbox.messages_sent,
            "messages_received": outbox.messages_received,
            "paths_lost": outbox.paths_lost,
            "links_open": self._worker.links_open,
        }

    def close(self) -> None:
        """Closes all links and joins the worker. Idempotent. Raises TransportError when called from a callback."""
        with self._close_lock:
            if not self._closed:
                self._worker.stop()
                self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
