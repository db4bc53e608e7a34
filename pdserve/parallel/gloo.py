"""Groups of processes on CPUs, by torch.distributed's gloo backend.

The backend is used by itself, without the default group that torch has for a process: what a failed start leaves in
that makes every later one in the process fail.
Groups of GPUs need arrays on the device and NCCL behind the same protocol; there is no such implementation yet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed.rendezvous import rendezvous as meet

from pdserve.errors import ConfigError, RankLost
from pdserve.parallel.group import Alone, Element, Floats, Group, ModelParallel

LOOP_THREAD = "gloo_tcp_loop"


@dataclass(frozen=True, slots=True)
class RankLayout:
    """`dp` replicas of `tp` ranks: replica d's rank t is rank `d * tp + t` of all. `ep` deals experts over all."""

    tp: int = 1
    dp: int = 1
    ep: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.dp


@dataclass(frozen=True, slots=True)
class Spent:
    """What a rank's collectives have cost it so far; the time includes waiting for ranks that came later."""

    collectives: int = 0
    seconds: float = 0.0


class GlooGroup:
    """Implements `Group`. One thread at a time may use it."""

    def __init__(self, backend: Any, members: Sequence[int], own: int) -> None:
        self._backend = backend
        self.rank = tuple(members).index(own)
        self.size = len(members)
        self._collectives = 0
        self._seconds = 0.0

    def all_reduce(self, array: Floats) -> None:
        """Of two, gloo's own sum; of more, the sum in order of ranks, as gloo's order depends on an element's place."""
        if not array.size:
            return
        if self.size == 2:
            tensors = [torch.from_numpy(array)]
            self._run("all_reduce", lambda backend: backend.allreduce(tensors))
            return
        parts = self.all_gather(array)
        np.copyto(array, parts[0])
        for part in parts[1:]:
            array += part

    def all_gather(self, array: NDArray[Element]) -> NDArray[Element]:
        gathered = np.empty((self.size, *array.shape), array.dtype)
        parts, mine = [torch.from_numpy(part) for part in gathered], torch.from_numpy(array)
        self._run("all_gather", lambda backend: backend.allgather([parts], [mine]))
        return gathered

    def gather(self, array: NDArray[Element]) -> NDArray[Element] | None:
        gathered = np.empty((self.size, *array.shape), array.dtype) if self.rank == 0 else None
        parts = [] if gathered is None else [torch.from_numpy(part) for part in gathered]
        mine = torch.from_numpy(array)
        self._run("gather", lambda backend: backend.gather(parts, mine, 0))
        return gathered

    def all_to_all(self, rows: NDArray[Element], sent: Sequence[int], received: Sequence[int]) -> NDArray[Element]:
        result = np.empty((sum(received), *rows.shape[1:]), rows.dtype)
        to, source = torch.from_numpy(result), torch.from_numpy(rows)
        self._run("all_to_all", lambda backend: backend.alltoall_base(to, source, list(received), list(sent)))
        return result

    def broadcast(self, array: NDArray[Any]) -> None:
        tensor = torch.from_numpy(array)
        self._run("broadcast", lambda backend: backend.broadcast(tensor, 0))

    def spent(self) -> Spent:
        return Spent(self._collectives, self._seconds)

    def close(self) -> None:
        """Nothing can be done together any more. Idempotent."""
        self._backend = None

    def _run(self, call: str, begin: Callable[[Any], Any]) -> None:
        backend, begun_s = self._backend, time.perf_counter()
        if backend is None:
            raise RankLost(f"{call} of rank {self.rank}: it has left the group")
        try:
            begin(backend).wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RankLost(f"{call} of rank {self.rank} with {self.size - 1} others did not end: {reason}") from error
        self._collectives += 1
        self._seconds += time.perf_counter() - begun_s


class GlooRanks:
    """This process's membership in a node of several ranks; `close()` leaves it.

    `rendezvous` is torch.distributed's: "tcp://host:port" of rank 0, or "file:///path", fresh. Waits for all ranks,
    `timeout_s` at most; each collective later on waits `collective_timeout_s`, by default as long.
    Raises ConfigError, RankLost.
    """

    def __init__(
        self,
        layout: RankLayout,
        rank: int,
        rendezvous: str,
        timeout_s: float = 60.0,
        collective_timeout_s: float | None = None,
    ) -> None:
        if not 0 <= rank < layout.ranks:
            raise ConfigError(f"rank {rank} is not one of {layout.ranks} (tp {layout.tp} x dp {layout.dp})")
        self._rank = rank
        self._timeout = timedelta(seconds=timeout_s)
        self._collective_timeout = timedelta(
            seconds=timeout_s if collective_timeout_s is None else collective_timeout_s
        )
        self._groups: list[GlooGroup] = []
        try:
            self._store: Store | None = (store := self._meet(layout, rendezvous))
            first = rank - rank % layout.tp
            tp = self._group(store, "tp", range(first, first + layout.tp))
            ep = self._group(store, "ep", range(layout.ranks)) if layout.ep else Alone()
        except (RuntimeError, ValueError) as error:
            self.close()
            raise RankLost(f"rank {rank} could not join {layout.ranks} ranks at {rendezvous}: {error}") from error
        self.parallel = ModelParallel(tp, ep)
        _calm_loops()

    def _meet(self, layout: RankLayout, rendezvous: str) -> Store:
        """Returns when all ranks are there. Rank 0's store may be what the others ask: it is kept."""
        store: Store
        store, _, _ = next(meet(rendezvous, self._rank, layout.ranks, timeout=self._timeout))
        store.set_timeout(self._timeout)  # also for a file whose folder is gone
        store.set(f"rank {self._rank}", "here")
        store.wait([f"rank {rank}" for rank in range(layout.ranks)], self._timeout)
        return store

    def _group(self, store: Store, name: str, members: range) -> Group:
        if len(members) == 1:
            return Alone()
        own = PrefixStore(f"{name} {members.start}", store)
        backend = ProcessGroupGloo(own, members.index(self._rank), len(members), self._timeout)
        backend.set_timeout(self._collective_timeout)
        self._groups.append(GlooGroup(backend, members, self._rank))
        return self._groups[-1]

    def spent(self) -> Spent:
        """In all of its groups."""
        each = [group.spent() for group in self._groups]
        return Spent(sum(one.collectives for one in each), sum(one.seconds for one in each))

    def close(self) -> None:
        """Idempotent."""
        for group in self._groups:
            group.close()
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _calm_loops() -> None:
    """Keeps gloo's event loops from cutting in on the thread that they wait for.

    A loop polls without a rest while another thread of its process holds the connection. Where a rank has one core, it
    cuts in on that thread by waking up, and then polls until its time slice is over. As a batch thread it cuts in on
    nobody: the mean of an all-reduce of 2 KiB went from 1.1 ms to 0.14 ms (two ranks that compute 2 ms in between).
    """
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # threads that have ended meanwhile
            if (task / "comm").read_text().startswith(LOOP_THREAD):
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
