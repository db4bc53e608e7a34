"""Which NICs carry which pair of ranks, and what every NIC then carries.

A rank has the NICs nearest to its device (`transport.topology.place`); two ranks exchange over the pairs of NICs that
`transport.shard.pairings` makes, same rail first, and their writes are dealt evenly over a pairing's pairs, transfers
taking the pairings in turn. So a pair of NICs carries a fixed share of a pair of ranks: the number of pairings that it
is in, over pairings times pairs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from policies.plan import RankWrites, TransferPlan
from policies.sharding import ShardingError
from transport.shard import pairings
from transport.topology import DevicePlacement


@dataclass(frozen=True, slots=True)
class RankNic:
    name: str
    rail: int  # unique in the node


RankNics = tuple[RankNic, ...]
"""The NICs of one rank, in rail order."""


@dataclass(frozen=True, slots=True)
class NicShare:
    """What one pair of NICs carries of one pair of ranks' bytes."""

    source: RankNic
    destination: RankNic
    share: Fraction

    @property
    def on_rail(self) -> bool:
        return self.source.rail == self.destination.rail


@dataclass(frozen=True, slots=True)
class NicAssignment:
    """`paths[k]` carries the plan's entry k; loads are in bytes, by (rank, rail) of a side."""

    paths: tuple[tuple[NicShare, ...], ...]
    prefill_load: dict[tuple[int, int], Fraction]
    decode_load: dict[tuple[int, int], Fraction]


def nics_of(placements: Sequence[DevicePlacement]) -> tuple[RankNics, ...]:
    """Per rank, where rank k of a node computes on its device k."""
    return tuple(tuple(RankNic(nic.name, nic.rail) for nic in placement.nics) for placement in placements)


def even_nics(ranks: int, per_rank: int) -> tuple[RankNics, ...]:
    """NICs of a node that is known only by their number; rails count through the ranks."""
    return tuple(
        tuple(RankNic(f"nic{rail}", rail) for rail in range(rank * per_rank, (rank + 1) * per_rank))
        for rank in range(ranks)
    )


def rails_of(nics: Sequence[RankNics]) -> tuple[frozenset[int], ...]:
    """What `draw_sources` goes by."""
    return tuple(frozenset(nic.rail for nic in rank) for rank in nics)


def share_nics(here: RankNics, there: RankNics) -> tuple[NicShare, ...]:
    """The pairs of NICs of two ranks and their shares, which sum to 1. Raises ShardingError where a side has none."""
    if not here or not there:
        raise ShardingError(
            f"NICs: {len(here)} at the prefill rank, {len(there)} at the decode rank; each rank needs one at least"
        )
    ways = pairings(tuple(nic.rail for nic in here), tuple(nic.rail for nic in there))
    times = Counter(pair for pairs in ways for pair in pairs)
    total = sum(times.values())
    return tuple(NicShare(here[i], there[j], Fraction(count, total)) for (i, j), count in sorted(times.items()))


def assign_nics(plan: TransferPlan, prefill: Sequence[RankNics], decode: Sequence[RankNics]) -> NicAssignment:
    """`prefill`, `decode`: NICs of the two replicas' ranks. Raises ShardingError."""
    for where, nics, ranks in (
        ("prefill", prefill, plan.request.prefill.tp),
        ("decode", decode, plan.request.decode.tp),
    ):
        if len(nics) != ranks:
            raise ShardingError(f"NICs are given for {len(nics)} ranks at {where}; its replica has {ranks}")
    paths = tuple(share_nics(prefill[entry.source], decode[entry.destination]) for entry in plan.entries)
    loads = _loads(plan.entries, paths)
    for load, nics in zip(loads, (prefill, decode), strict=True):
        for rank, mine in enumerate(nics):
            for nic in mine:
                load.setdefault((rank, nic.rail), Fraction(0))
    return NicAssignment(paths, dict(sorted(loads[0].items())), dict(sorted(loads[1].items())))


def _loads(
    entries: Sequence[RankWrites], paths: Sequence[tuple[NicShare, ...]]
) -> tuple[dict[tuple[int, int], Fraction], dict[tuple[int, int], Fraction]]:
    here: defaultdict[tuple[int, int], Fraction] = defaultdict(Fraction)
    there: defaultdict[tuple[int, int], Fraction] = defaultdict(Fraction)
    for entry, pairs in zip(entries, paths, strict=True):
        for pair in pairs:
            here[entry.source, pair.source.rail] += entry.bytes * pair.share
            there[entry.destination, pair.destination.rail] += entry.bytes * pair.share
    return dict(here), dict(there)
