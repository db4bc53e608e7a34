"""What is to be measured, as the command line says it."""

from __future__ import annotations

import os
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
PAGES_BYTES = (KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB)
SINGLES_BYTES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
SECTIONS = ("paged", "single", "operations", "latency", "post", "idle")
BY_ADDRESS = ("tcp", "tcp;ofi_rxm", "sockets")
"""Providers of which this host's loopback addresses serve as several NICs."""
LOCAL_NICS = ("127.0.0.1", "127.0.0.2")
WITHOUT_NICS = ("shm", "ucx")
Nics = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """`cpus` are the sender's and the receiver's, empty where there are too few to pin to.

    `wires_asked`: they were named, so that one that cannot be opened is an error.
    `connect` is the other host's address and port, `nics` and `their_nics` what each side opens beyond its best NIC.
    """

    wires: tuple[str, ...]
    wires_asked: bool = True
    sections: tuple[str, ...] = SECTIONS
    pages_bytes: tuple[int, ...] = PAGES_BYTES
    singles_bytes: tuple[int, ...] = SINGLES_BYTES
    total_bytes: int = 128 * MIB
    window: int = 128
    rounds: int = 9
    trips: int = 400
    """Round trips of one burst; there is a burst for each round."""
    immediates: int = 20_000
    post_blocks: int = 4_000
    loopback_blocks: int = 1_000_000
    idle_s: float = 5.0
    wake_ups: int = 20
    cpus: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    peers_python: str | None = None
    programs: bool = False
    fabtests: str | None = None
    connect: tuple[str, int] | None = None
    nics: tuple[str, ...] = ()
    their_nics: tuple[str, ...] = ()

    def nics_on(self, wire: str) -> tuple[Nics, Nics]:
        """(ours, theirs): the NICs of a link over several; empty where there is only one to be had."""
        if wire in WITHOUT_NICS:
            return (), ()
        if self.nics:
            return self.nics, self.their_nics or self.nics
        return (LOCAL_NICS, LOCAL_NICS) if wire in BY_ADDRESS and self.connect is None else ((), ())

    def nic_on(self, wire: str) -> tuple[Nics, Nics]:
        """The same of a link over one; empty for the provider's own choice."""
        ours, theirs = self.nics_on(wire) if self.nics else ((), ())
        return ours[:1], theirs[:1]


def cpus_of_sides(allowed: set[int] | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two CPUs for each side, one where there are fewer than four, none where there is only one."""
    cpus = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    each = min(2, len(cpus) // 2)
    return tuple(cpus[:each]), tuple(cpus[each : 2 * each])


def size_bytes(text: str) -> int:
    """`64KiB`, `64k`, `1MiB` or a plain number. Raises ValueError."""
    lowered = text.strip().lower()
    for suffix, factor in (("kib", KIB), ("mib", MIB), ("k", KIB), ("m", MIB), ("", 1)):
        if lowered.endswith(suffix):
            number = int(lowered.removesuffix(suffix).strip() if suffix else lowered)
            if number < 1:
                raise ValueError(f"{text!r} is not a size")
            return number * factor
    raise AssertionError
