"""What the lanes of one link share, and the paths as a lane posts them."""

from __future__ import annotations

from dataclasses import dataclass, field

from transport.fabric.posting import NOTHING, Request
from transport.outgoing import Outbox, Outgoing, Path
from transport.transfer import Order


@dataclass(slots=True)
class Traffic:
    """`window` is how many writes the link may have outstanding in all; `fragments` of messages have come."""

    outbox: Outbox
    outgoing: Outgoing
    stall_timeout_s: float
    peer: str = ""
    window: int = 0
    fragments: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Route:
    """A path from one lane; `dest` is what posts take for the NIC there.

    `stalled_since` is when the provider began to refuse what is posted there, None while it does not.
    """

    path: Path
    dest: int
    stalled_since: float | None = None
    ready: tuple[Order | None, Request] = (None, NOTHING)
    """The last write that was posted by itself, to be posted again without being made ready again."""
