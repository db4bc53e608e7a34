"""Waiting until a link has nothing queued and nothing in flight."""

from __future__ import annotations

import time

from transport.errors import TransportClosed, TransportError
from transport.inbox import Inbox
from transport.outgoing import Outgoing


def quiesce(inbox: Inbox, outgoing: Outgoing, timeout_s: float | None) -> int:
    """Returns the number of writes posted, in all. Raises TimeoutError, naming what is not done; TransportError."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            left = inbox.call(lambda: outgoing.transfers)
        except TransportClosed:  # then every transfer is done
            return outgoing.posted_total
        if not left:
            return outgoing.posted_total
        if inbox.on_worker:
            raise TransportError("a link cannot be waited for in its transport's callbacks")
        for transfer in left:
            if not transfer.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                names = ", ".join(str(transfer) for transfer in left if not transfer.done)
                raise TimeoutError(f"after {timeout_s} s the link still writes: {names or 'it was about to finish'}")
