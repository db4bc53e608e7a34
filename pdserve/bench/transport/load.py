"""What one round moves. Plain data that travels to both sides, and the order of blocks that both derive from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

SEED = 5
MOST_BLOCKS = 32_768
"""Of one round: small blocks are slow enough to be timed with fewer bytes."""

Kind = Literal["paged", "single", "immediate"]


@dataclass(frozen=True, slots=True)
class Load:
    """`blocks` blocks of `block_bytes`: one paged write, single writes in order, or immediates of no payload."""

    kind: Kind
    block_bytes: int
    blocks: int

    @classmethod
    def over(cls, kind: Kind, block_bytes: int, total_bytes: int) -> Load:
        """As many blocks as fit `total_bytes`, within reason. Raises ValueError if none does."""
        blocks = min(total_bytes // block_bytes, MOST_BLOCKS)
        if blocks < 1:
            raise ValueError(f"a block of {block_bytes} bytes does not fit {total_bytes} bytes of memory")
        return cls(kind, block_bytes, blocks)

    @property
    def total_bytes(self) -> int:
        return self.block_bytes * self.blocks

    def order(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(blocks,) int64 each: which block of the sender goes to which of the receiver in round `number`."""
        if self.kind != "paged":
            return np.arange(self.blocks), np.arange(self.blocks)
        rng = np.random.default_rng((SEED, self.block_bytes, number))
        return rng.permutation(self.blocks), rng.permutation(self.blocks)

    def content(self) -> NDArray[np.uint8]:
        """(blocks, block_bytes) uint8: what the sender's memory begins with when it is verified."""
        rng = np.random.default_rng((SEED, self.block_bytes))
        return rng.integers(0, 256, (self.blocks, self.block_bytes), np.uint8)


@dataclass(frozen=True, slots=True)
class SideSpec:
    """Which side of which pair a process is to be."""

    system: str
    provider: str
    sends: bool
    total_bytes: int
    window: int
    nics: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()
    host: str = "127.0.0.1"
    """The address under which the other side reaches this one, for systems that ask for it."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> SideSpec:
        return cls(**{**fields, "nics": tuple(fields["nics"]), "cpus": tuple(fields["cpus"])})
