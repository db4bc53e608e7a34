"""How long a worker rests: it spins briefly after something has moved, then blocks or looks from time to time.

Where every queue has a descriptor that wakes (all but `shm`), it blocks, and the safety net is
a look every `_SURE_NS`. Where not, the peer rings a doorbell (`transport.doorbell`), and it looks
between sleeps that grow while nothing comes.

Measured between two processes on two quiet cores, from the caller's write to the callback of the receiver's counter:
within the spin 12–16 µs; after 2 ms of silence 110 µs on `tcp` and 130 µs on `shm` (p99 0.2–0.5 ms), after 50 ms
0.3–0.4 ms (p99 below 2 ms). An idle engine with an open link took 0.2–0.6 % of a core. The descriptor cost `tcp` no
bandwidth.
"""

from __future__ import annotations

from typing import NamedTuple

SHORTEST_NS = 10_000
"""First sleep after something has moved."""
_SPIN_NS = 50_000
_BUSY_NS = 200_000
"""Longest sleep while something is armed or in flight: polling then costs about a fiftieth of a core."""
_IDLE_NS = 10_000_000
"""Longest sleep while links are open: so long may a peer's write wait if nothing is armed for it, nor the bell rung."""
_SURE_NS = 50_000_000
_BLOCKED_NS = 100_000
_BUSY_TOTAL_NS = 20_000_000
_IDLE_TOTAL_NS = 1_000_000_000


class Pause(NamedTuple):
    """What `Rest` takes, in nanoseconds: polling before it sleeps; first sleep, longest sleep, sleep in all."""

    spin_ns: int
    sleep_ns: int
    longest_ns: int
    total_ns: int


ALONE = Pause(0, _IDLE_TOTAL_NS, _IDLE_TOTAL_NS, _IDLE_TOTAL_NS)
"""No link is open: only a request ends the rest."""
SPIN = Pause(1_000_000, 0, 0, 0)
"""Never sleeps, but looks for requests from time to time."""


def pause(sleep_ns: int, *, blocked: bool, sure: bool, busy: bool) -> Pause:
    """`sleep_ns` is what the last rest ended with. `blocked`: a post was refused and is to be tried again soon."""
    spin_ns = _SPIN_NS if sleep_ns <= SHORTEST_NS else 0
    if blocked:
        return Pause(spin_ns, min(sleep_ns, _BLOCKED_NS), _BLOCKED_NS, _BLOCKED_NS)
    if sure:
        return Pause(spin_ns, _SURE_NS, _SURE_NS, _SURE_NS)
    longest = _BUSY_NS if busy else _IDLE_NS
    return Pause(spin_ns, min(sleep_ns, longest), longest, _BUSY_TOTAL_NS if busy else _IDLE_TOTAL_NS)
