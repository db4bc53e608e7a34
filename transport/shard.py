"""Which NIC talks to which, and which of them carries what: pure arithmetic over rails and block numbers.

Dealing changes no count: a block is one write, whatever carries it.
"""

from __future__ import annotations

Pair = tuple[int, int]
"""(index of a NIC here, index of a NIC there)."""


def pairings(here: tuple[int, ...], there: tuple[int, ...]) -> tuple[tuple[Pair, ...], ...]:
    """The ways to pair two sides' NICs, given by their rails; transfers take them in turn.

    Each pairing has max(a, b) pairs. NICs on the same rail are paired first, then those that are left on both sides;
    the rest of the longer side goes round the shorter one, a step further in each pairing, so that over all pairings
    every NIC of a side is in equally many pairs. Raises ValueError if a side has no NIC.
    """
    if not here or not there:
        raise ValueError("a side without a NIC cannot be paired")
    if len(here) < len(there):
        return tuple(tuple((i, j) for j, i in pairs) for pairs in pairings(there, here))
    matched = _matched(here, there)
    taken = {i for i, _ in matched}
    spare = [i for i in range(len(here)) if i not in taken]
    turns = len(there) if len(spare) % len(there) else 1
    return tuple(
        tuple(sorted(matched + [(i, (k + turn) % len(there)) for k, i in enumerate(spare)])) for turn in range(turns)
    )


def _matched(here: tuple[int, ...], there: tuple[int, ...]) -> list[Pair]:
    """Each NIC of the shorter side `there` with one of `here`: its rail's where it can be."""
    pairs: list[Pair] = []
    free, left = list(range(len(here))), []
    for j in range(len(there)):
        same = next((i for i in free if here[i] == there[j]), None)
        if same is None:
            left.append(j)
        else:
            free.remove(same)
            pairs.append((same, j))
    return pairs + list(zip(free, left, strict=False))


def deal(blocks: int, paths: int, first: int = 0) -> list[tuple[int, int, int]]:
    """Contiguous ranges of `blocks` over `paths`: (path, start, stop), the empty ones left out.

    Lengths differ by one at most. The path `first` (taken modulo `paths`) gets the first range, and the longer ones go
    to it and those that follow; callers rotate it. Raises ValueError without a path.
    """
    if paths < 1:
        raise ValueError("there is no path to deal blocks to")
    length, longer = divmod(blocks, paths)
    ranges, start = [], 0
    for k in range(paths):
        stop = start + length + (k < longer)
        if stop > start:
            ranges.append(((first + k) % paths, start, stop))
        start = stop
    return ranges
