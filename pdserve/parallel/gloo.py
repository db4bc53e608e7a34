"""Groups of processes on CPUs, by torch.distributed's gloo backend.

Groups of GPUs need arrays on the device and NCCL behind the same protocol; there is no such implementation yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pdserve.errors import ConfigError, RankLost
from pdserve.parallel.group import Alone, Element, Floats, Group, ModelParallel


@dataclass(frozen=True, slots=True)
class RankLayout:
    """`dp` replicas of `tp` ranks: replica d's rank t is rank `d * tp + t` of all. `ep` deals experts over all."""

    tp: int = 1
    dp: int = 1
    ep: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.dp


class GlooGroup:
    """Implements `Group`. One thread at a time may use it."""

    def __init__(self, members: Sequence[int], handle: Any) -> None:
        self._handle = handle
        self._members = tuple(members)
        self.rank = self._members.index(dist.get_rank())
        self.size = len(self._members)

    def all_reduce(self, array: Floats) -> None:
        """Of two, gloo's own sum; of more, the sum in order of ranks, as gloo's order depends on an element's place."""
        if not array.size:
            return
        if self.size == 2:
            tensor = torch.from_numpy(array)
            self._run("all_reduce", lambda: dist.all_reduce(tensor, group=self._handle))
            return
        parts = self.all_gather(array)
        np.copyto(array, parts[0])
        for part in parts[1:]:
            array += part

    def all_gather(self, array: NDArray[Element]) -> NDArray[Element]:
        gathered = np.empty((self.size, *array.shape), array.dtype)
        parts = [torch.from_numpy(part) for part in gathered]
        mine = torch.from_numpy(array)
        self._run("all_gather", lambda: dist.all_gather(parts, mine, group=self._handle))
        return gathered

    def gather(self, array: NDArray[Element]) -> NDArray[Element] | None:
        gathered = np.empty((self.size, *array.shape), array.dtype) if self.rank == 0 else None
        parts = None if gathered is None else [torch.from_numpy(part) for part in gathered]
        mine, root = torch.from_numpy(array), self._members[0]
        self._run("gather", lambda: dist.gather(mine, parts, dst=root, group=self._handle))
        return gathered

    def all_to_all(self, rows: NDArray[Element], sent: Sequence[int], received: Sequence[int]) -> NDArray[Element]:
        result = np.empty((sum(received), *rows.shape[1:]), rows.dtype)
        to, source = torch.from_numpy(result), torch.from_numpy(rows)
        self._run(
            "all_to_all",
            lambda: dist.all_to_all_single(to, source, list(received), list(sent), group=self._handle),
        )
        return result

    def broadcast(self, array: NDArray[Any]) -> None:
        tensor, root = torch.from_numpy(array), self._members[0]
        self._run("broadcast", lambda: dist.broadcast(tensor, src=root, group=self._handle))

    def _run(self, call: str, collective: Callable[[], Any]) -> None:
        try:
            collective()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RankLost(f"{call} of rank {self.rank} with {self.size - 1} others did not end: {reason}") from error


class GlooRanks:
    """This process's membership in a node of several ranks; `close()` leaves it.

    `rendezvous` is torch.distributed's: "tcp://host:port" of rank 0, or "file:///path". A process can join once at a
    time. Waits for all ranks, `timeout_s` at most, as every later collective does. Raises ConfigError, RankLost.
    """

    def __init__(self, layout: RankLayout, rank: int, rendezvous: str, timeout_s: float = 60.0) -> None:
        if not 0 <= rank < layout.ranks:
            raise ConfigError(f"rank {rank} is not one of {layout.ranks} (tp {layout.tp} x dp {layout.dp})")
        timeout = timedelta(seconds=timeout_s)
        try:
            dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=layout.ranks, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise RankLost(f"rank {rank} could not join {layout.ranks} ranks at {rendezvous}: {error}") from error
        self._open = True
        self.parallel = self._groups(layout, rank)

    def _groups(self, layout: RankLayout, rank: int) -> ModelParallel:
        everyone = tuple(range(layout.ranks))
        replicas = [everyone[start : start + layout.tp] for start in range(0, layout.ranks, layout.tp)]
        found = {members: _group(members) for members in replicas}  # every rank takes part in making every group
        tp = found[replicas[rank // layout.tp]]
        return ModelParallel(tp, _group(everyone) if layout.ep else Alone())

    def close(self) -> None:
        """Idempotent."""
        if self._open:
            self._open = False
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _group(members: tuple[int, ...]) -> Group:
    if len(members) == 1:
        return Alone()
    handle = dist.new_group(list(members))
    return GlooGroup(members, handle) if dist.get_rank() in members else Alone()
