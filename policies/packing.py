"""Which host takes how many nodes of which kind: exact, since a wrong "does not fit" stops a deployment that does.

Nodes come in few kinds, so a search over numbers of nodes placed, host after host, stays small: of the placements that
the hosts so far allow, only those are kept that no other surpasses in every kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

Units = Mapping[str, int]
"""Amounts of resources in ten-thousandths: whole numbers, so that fractions of a CPU add up exactly."""

Counts = tuple[int, ...]
"""Nodes by kind."""


@dataclass(frozen=True, slots=True)
class Spread:
    """`counts[h]`: nodes that host h gets; `missing`: nodes without a host, () if there are none."""

    counts: tuple[Counts, ...]
    missing: Counts


def units(amounts: Mapping[str, float], times: int = 1) -> dict[str, int]:
    return {name: round(amount * 10_000) * times for name, amount in amounts.items()}


def spread(demands: Sequence[Units], wanted: Sequence[int], hosts: Sequence[Units]) -> Spread:
    """Places all nodes with as few on the fullest host as can be, kinds apart from each other where that costs none.

    If they do not fit, as many as fit, those of every kind first.
    """
    target = tuple(wanted)
    densest = _search(demands, target, hosts, (sum(target), True))
    if densest.missing:
        return densest
    for most in range(-(-sum(target) // max(len(hosts), 1)), sum(target)):
        for mixed in (False, True):
            found = _search(demands, target, hosts, (most, mixed))
            if not found.missing:
                return found
    return densest


def _search(demands: Sequence[Units], target: Counts, hosts: Sequence[Units], rule: tuple[int, bool]) -> Spread:
    reached: dict[Counts, tuple[Counts, ...]] = {(0,) * len(target): ()}
    for host in hosts:
        options = _options(demands, target, host, rule)
        following: dict[Counts, tuple[Counts, ...]] = {}
        for placed, path in reached.items():
            for option in options:
                taken = tuple(min(o, t - p) for o, t, p in zip(option, target, placed, strict=True))
                total = tuple(p + t for p, t in zip(placed, taken, strict=True))
                following.setdefault(total, (*path, taken))
        reached = _unsurpassed(following)
    placed = max(reached, key=lambda counts: (sum(map(bool, counts)), sum(counts)))
    missing = tuple(t - p for t, p in zip(target, placed, strict=True))
    return Spread(reached[placed], missing if any(missing) else ())


def _options(demands: Sequence[Units], target: Counts, host: Units, rule: tuple[int, bool]) -> list[Counts]:
    """The numbers of nodes that fit on one host together, the greatest ones only."""
    most, mixed = rule
    alone = [min(count, most, _fitting(demand, host)) for demand, count in zip(demands, target, strict=True)]
    fitting = [
        counts
        for counts in product(*(range(limit + 1) for limit in alone))
        if sum(counts) <= most and (mixed or sum(map(bool, counts)) <= 1) and _fits(demands, counts, host)
    ]
    return list(_unsurpassed(dict.fromkeys(fitting, ())))


def _fitting(demand: Units, host: Units) -> int:
    return min((host.get(name, 0) // amount for name, amount in demand.items() if amount), default=1 << 30)


def _fits(demands: Sequence[Units], counts: Counts, host: Units) -> bool:
    names = {name for demand in demands for name in demand}
    return all(
        sum(count * demand.get(name, 0) for count, demand in zip(counts, demands, strict=True)) <= host.get(name, 0)
        for name in names
    )


def _unsurpassed(states: dict[Counts, tuple[Counts, ...]]) -> dict[Counts, tuple[Counts, ...]]:
    """Those that no other one equals or exceeds in every kind."""
    kept: dict[Counts, tuple[Counts, ...]] = {}
    for counts in sorted(states, key=sum, reverse=True):
        if not any(all(a >= b for a, b in zip(other, counts, strict=True)) for other in kept):
            kept[counts] = states[counts]
    return kept
