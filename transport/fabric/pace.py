"""How long a worker rests: it spins briefly after something has moved, then blocks or looks from time to time.

Where every queue has a descriptor that wakes (`tcp`, `tcp;ofi_rxm`, `verbs;ofi_rxm`), it blocks, and the safety net is
a look every `_SURE_NS`. Where not (`shm`, `sockets`), the peer rings a doorbell (`transport.doorbell`), and it looks
between sleeps that grow while nothing comes.
"""

from __future__ import annotations

from typing import NamedTuple

SHORTEST_NS = 10_000
"""First sleep after something has moved."""
_SPINS = 40
_SPINS_ONLY = 1000
_BUSY_NS = 200_000
"""Longest sleep while something is armed or in flight: polling then costs about a fiftieth of a core."""
_IDLE_NS = 10_000_000
"""Longest sleep while links are open: so long may a peer's write wait if nothing is armed for it, nor the bell rung."""
_SURE_NS = 50_000_000
_BLOCKED_NS = 100_000
_BUSY_TOTAL_NS = 20_000_000
_IDLE_TOTAL_NS = 1_000_000_000


class Pause(NamedTuple):
    """What `Rest` takes: polls before it sleeps; first sleep, longest sleep and sleep in all, in nanoseconds."""

    spins: int
    sleep_ns: int
    longest_ns: int
    total_ns: int


ALONE = Pause(0, _IDLE_TOTAL_NS, _IDLE_TOTAL_NS, _IDLE_TOTAL_NS)
"""No link is open: only a request ends the rest."""
SPIN = Pause(_SPINS_ONLY, 0, 0, 0)
"""Never sleeps, but looks for requests from time to time."""


def pause(sleep_ns: int, *, blocked: bool, sure: bool, busy: bool) -> Pause:
    """`sleep_ns` is what the last rest ended with. `blocked`: a post was refused and is to be tried again soon."""
    spins = _SPINS if sleep_ns <= SHORTEST_NS else 0
    if blocked:
        return Pause(spins, min(sleep_ns, _BLOCKED_NS), _BLOCKED_NS, _BLOCKED_NS)
    if sure:
        return Pause(spins, _SURE_NS, _SURE_NS, _SURE_NS)
    longest = _BUSY_NS if busy else _IDLE_NS
    return Pause(spins, min(sleep_ns, longest), longest, _BUSY_TOTAL_NS if busy else _IDLE_TOTAL_NS)
