"""What ranks do together: the seam between models and the library that joins their processes.

Two implementations: `Alone` for a node of one rank, `GlooGroup` over torch.distributed for several processes on CPUs.
Every rank of a group makes the same calls in the same order; a call waits for the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Element = TypeVar("Element", bound=np.generic)


class Group(Protocol):
    """Arrays are C-contiguous numpy arrays. A rank that was lost shows as RankLost in the others."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, array: Floats) -> None:
        """Sums the ranks' arrays in place; equal shapes. An element's sum does not depend on its place in the array."""
        ...

    def all_gather(self, array: NDArray[Element]) -> NDArray[Element]:
        """`(size, *array.shape)`: the ranks' arrays, equal in shape."""
        ...

    def gather(self, array: NDArray[Element]) -> NDArray[Element] | None:
        """As `all_gather` at rank 0; None elsewhere."""
        ...

    def all_to_all(self, rows: NDArray[Element], sent: Sequence[int], received: Sequence[int]) -> NDArray[Element]:
        """Deals rows `(sum(sent), …)`, `sent[i]` of them to rank i; returns `(sum(received), …)`, in order of ranks."""
        ...

    def broadcast(self, array: NDArray[Any]) -> None:
        """Rank 0's array, in place."""
        ...


class Alone:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, array: Floats) -> None: ...

    def all_gather(self, array: NDArray[Element]) -> NDArray[Element]:
        return array[None]

    def gather(self, array: NDArray[Element]) -> NDArray[Element] | None:
        return array[None]

    def all_to_all(self, rows: NDArray[Element], sent: Sequence[int], received: Sequence[int]) -> NDArray[Element]:
        return rows

    def broadcast(self, array: NDArray[Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelParallel:
    """The groups that one rank computes in.

    `tp` shares every request's attention, MLPs and vocabulary. `ep` deals whole experts; without it, `tp` slices every
    expert. With ranks of several replicas in `ep`, each of these ranks takes part in every step of the others, be it
    with an empty batch.
    """

    tp: Group = field(default_factory=Alone)
    ep: Group = field(default_factory=Alone)


def parts(total: int, size: int) -> list[slice]:
    """Contiguous parts of `total` things, one per rank; they differ by one at most."""
    return [slice(total * rank // size, total * (rank + 1) // size) for rank in range(size)]


def share(total: int, group: Group) -> slice:
    """This rank's part."""
    return parts(total, group.size)[group.rank]
