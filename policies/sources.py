"""Which source replica set serves which destination replica set: drawn by the prefill node, once per request.

The count does not depend on the draw, so the decode node needs not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from random import Random

from policies.sharding import LayerGroup, shards, shares


class SourcePolicy(StrEnum):
    RANDOM = "random"
    """A random permutation: over many requests every source carries its share."""
    RAIL = "rail"
    """The source whose NICs are on the destination's rails; at random among those that are equally near."""


Assignment = tuple[int, ...]
"""For each destination replica set the source replica set that serves it."""

Nearness = Callable[[int, int], int]
"""(source replica set, destination replica set) to the number of rails on which their partners meet."""

Rails = Sequence[frozenset[int]]
"""For each rank of a replica the rails of its NICs."""


def draw_sources(
    groups: Sequence[LayerGroup], tp: tuple[int, int], random: Random, rails: tuple[Rails, Rails] | None = None
) -> tuple[Assignment, ...]:
    """One assignment per layer group; groups that are sharded alike get the same one.

    `tp` and `rails` are of (prefill, decode). With rails, by the policy `rail`; else at random. Raises ShardingError.
    """
    drawn: dict[int | None, Assignment] = {}
    for group in groups:
        if group.kv_heads not in drawn:
            sizes = shards(group, tp[0], " at prefill").copies, shards(group, tp[1], " at decode").copies
            drawn[group.kv_heads] = (
                random_sources(*sizes, random)
                if rails is None
                else rail_sources(*sizes, random, rail_nearness(group, *rails))
            )
    return tuple(drawn[group.kv_heads] for group in groups)


def random_sources(sources: int, destinations: int, random: Random) -> Assignment:
    """A permutation of the sources, repeated when there are more destinations than sources."""
    order = random.sample(range(sources), sources)
    return tuple(order[k % sources] for k in range(destinations))


def rail_sources(sources: int, destinations: int, random: Random, nearness: Nearness) -> Assignment:
    """Nearest pairs first, each source once before any serves twice; ties fall at random."""
    chosen: dict[int, int] = {}
    pairs = [(s, d) for s in range(sources) for d in range(destinations)]
    while len(chosen) < destinations:
        random.shuffle(pairs)
        taken: set[int] = set()
        for s, d in sorted(pairs, key=lambda pair: -nearness(*pair)):
            if s not in taken and d not in chosen:
                taken.add(s)
                chosen[d] = s
    return tuple(chosen[d] for d in range(destinations))


def rail_nearness(group: LayerGroup, here: Rails, there: Rails) -> Nearness:
    """Counts the common rails of all pairs of ranks that would exchange. Raises ShardingError."""
    source, destination = shards(group, len(here), " at prefill"), shards(group, len(there), " at decode")
    partners = [(share.source, share.destination) for share in shares(source, destination)]

    def nearness(s: int, d: int) -> int:
        return sum(len(here[source.rank(s, i)] & there[destination.rank(d, j)]) for i, j in partners)

    return nearness
