"""The arrays that the loops work on: batches of one link, arrivals, and what a worker waits with."""

from __future__ import annotations

import ctypes as c
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transport.transfer import Part
from transport.ucx import abi, loops
from transport.ucx.binding import Loops
from transport.ucx.dll import UcxLibrary

_POLLIN = 1
_LIBC = c.CDLL(None)
_PR_SET_TIMERSLACK = 29
_ROWS = 64
"""Most batches of a link that may be outstanding."""


def _address(function: object) -> int:
    return c.cast(function, c.c_void_p).value or 0  # type: ignore[arg-type]


def function_table(library: UcxLibrary) -> NDArray[np.int64]:
    """What the loops call, in the order that they name."""
    lib = library.lib
    functions = (
        lib.ucp_worker_progress, lib.ucp_put_nbx, lib.ucp_ep_flush_nbx, lib.ucp_am_send_nbx,
        lib.ucp_request_check_status, lib.ucp_request_free, lib.ucp_worker_arm, _LIBC.memcpy, _LIBC.ppoll,
    )  # fmt: skip
    return np.array([_address(function) for function in functions], np.int64)


@dataclass(frozen=True, slots=True)
class Pumped:
    moved: bool
    tickets: NDArray[np.int64]
    status: int


class Poster:
    """Puts the batches of one link, and tells the receiver of each once it is flushed.

    `depth` is how many writes may be outstanding. They are cut into batches of about an eighth of it, so that several
    are under way while one is flushed.
    """

    def __init__(self, bound: Loops, table: NDArray[np.int64], worker: int, block: int, depth: int) -> None:
        self._loops, self._table = bound, table
        most = min(max(depth // 8, 1), loops.MOST_PER_BATCH)
        rows = min(-(-depth // most), _ROWS)
        self._batches = np.zeros((rows, loops.PUTS + most), np.int64)
        self._headers = np.zeros((rows, 2), np.int64)
        self._tickets = np.zeros(rows * most, np.int64)
        self._plain = abi.ucp_request_param_t()
        self._eager = eager()
        self._job = np.zeros(9, np.int64)
        params = (c.addressof(self._plain), c.addressof(self._eager))
        self._lane = np.array([worker, 0, *params, self._headers.ctypes.data, 0, block], np.int64)

    @property
    def plain(self) -> int:
        """Address of request parameters that ask for nothing."""
        return int(self._lane[loops.PLAIN])

    def direct(self, ep: int, peer: int) -> None:
        """From now on it puts through endpoint `ep` to the link whose identity is `peer`."""
        self._lane[loops.EP], self._lane[loops.PEER] = ep, peer

    def post(self, part: Part, rkey: int, param: int, most: int) -> tuple[int, int]:
        """Posts at most `most` writes of `part`. Returns (how many were posted, status of what ended it)."""
        o = part.transfer.order
        self._job[:] = (
            rkey, param or self.plain, o.source, o.source_stride, signed(o.target), o.target_stride,
            part.block_bytes, o.imm, part.ticket,
        )  # fmt: skip
        posted, status = self._loops.post(
            self._table, self._lane, self._job, o.source_index, o.target_index, part.at,
            min(part.stop, part.at + most), self._batches, self._headers,
        )  # fmt: skip
        return int(posted), int(status)

    def pump(self) -> Pumped:
        """Makes progress on everything of the worker. The array is a copy."""
        moved, count, status = self._loops.pump(self._table, self._lane, self._batches, self._tickets)
        return Pumped(bool(moved), self._tickets[:count].copy(), int(status))

    def discard(self) -> bool:
        """Frees what is left of the batches of a failed or closed endpoint; False if some still are under way."""
        return int(self._loops.discard(self._table, self._batches)) == 0


class Arrivals:
    """Where UCX's callbacks of one link put what has come. `block` is their argument."""

    def __init__(self, table: NDArray[np.int64], identity: int) -> None:
        self._imms = np.zeros((loops.IMM_CAPACITY, 2), np.int64)
        self._frames = np.zeros(loops.FRAME_CAPACITY * loops.FRAME_STRIDE, np.uint8)
        self._answers = np.zeros(loops.ANSWER_CAPACITY * loops.FRAME_HEADER_BYTES, np.uint8)
        self._param = eager()
        self._words = np.zeros(loops.BLOCK_WORDS, np.int64)
        self._words[loops.IDENTITY] = identity
        self._words[loops.IMMS] = self._imms.ctypes.data
        self._words[loops.FRAMES] = self._frames.ctypes.data
        self._words[loops.ANSWERS] = self._answers.ctypes.data
        self._words[loops.ANSWER_PARAM] = c.addressof(self._param)
        self._words[loops.COPY_AT] = table[loops.COPY]
        self._words[loops.TELL_AT] = table[loops.TELL]
        self._words[loops.FREE_AT] = table[loops.FREE]
        self.block = int(self._words.ctypes.data)

    @property
    def ep_status(self) -> int:
        """Why the endpoint has failed; 0 while it has not."""
        return int(self._words[loops.EP_STATUS])

    @property
    def overrun(self) -> bool:
        """More came at once than there is room for: something is lost."""
        return bool(self._words[loops.OVERRUN])

    def take_damaged(self) -> int:
        """How many active messages were no such of ours, or for another link."""
        count, self._words[loops.DAMAGED] = int(self._words[loops.DAMAGED]), 0
        return count

    def take_imms(self) -> NDArray[np.int64] | None:
        count = int(self._words[loops.N_IMMS])
        if not count:
            return None
        self._words[loops.N_IMMS] = 0
        return np.repeat(self._imms[:count, 0], self._imms[:count, 1])

    def take_frames(self) -> list[tuple[int, bytes]]:
        """(kind, data) of each."""
        count = int(self._words[loops.N_FRAMES])
        if not count:
            return []
        self._words[loops.N_FRAMES] = 0
        return [self._frame(loops.FRAME_STRIDE * n) for n in range(count)]

    def _frame(self, at: int) -> tuple[int, bytes]:
        kind, length = self._frames[at : at + 16].view(np.int64).tolist()
        return kind, self._frames[at + 16 : at + 16 + length].tobytes()


class Rest:
    """Waits for arrivals on any of several UCX workers, or to be woken. `wake` may be called from any thread."""

    def __init__(self, bound: Loops, table: NDArray[np.int64]) -> None:
        self._loops, self._table = bound, table
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._timespec = np.zeros(2, np.int64)
        self.watch([])

    def watch(self, workers: list[tuple[int, int]]) -> None:
        """`workers`: (handle, event descriptor) of each."""
        self._workers = np.array([handle for handle, _ in workers], np.int64)
        descriptors = [self._event, *(descriptor for _, descriptor in workers)]
        self._pollfds = np.array([descriptor | _POLLIN << 32 for descriptor in descriptors], np.int64)

    def __call__(self, spins: int, total_ns: int) -> bool:
        """See `loops.rest`; True if there may be something."""
        came = self._loops.rest(
            self._table, self._workers, self._pollfds, self._pollfds.ctypes.data,
            self._timespec, self._timespec.ctypes.data, spins, total_ns,
        )  # fmt: skip
        if came == -2:
            os.eventfd_read(self._event)
        return bool(came == 1)

    def wake(self) -> None:
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Idempotent."""
        if self._event >= 0:
            os.close(self._event)
            self._event = -1


def eager(flags: int = 0) -> abi.ucp_request_param_t:
    """The parameters of an active message that goes at once, whatever its length."""
    flags |= abi.UCP_AM_SEND_FLAG_EAGER
    return abi.ucp_request_param_t(op_attr_mask=abi.UCP_OP_ATTR_FIELD_FLAGS, flags=flags)


def precise_sleep() -> None:
    """Lets this thread sleep for tens of microseconds: by default the kernel adds up to 50."""
    _LIBC.prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def signed(value: int) -> int:
    """A 64-bit pattern as numba's int64."""
    return value - (1 << 64) if value >= 1 << 63 else value
