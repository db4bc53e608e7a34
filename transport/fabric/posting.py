"""Binds the loops to numba or to ctypes, and owns the arrays that they work on."""

from __future__ import annotations

import ctypes as c
import os
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from transport.fabric import abi, loops
from transport.transfer import Order

Calls = Literal["auto", "numba", "ctypes"]

ENTRIES = 256
"""Completions read by one call."""
_OUTPUTS = 4 * ENTRIES
_POLLIN = 1
_LIBC = c.CDLL(None)
_PPOLL = abi.address_of(_LIBC.ppoll)
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True, slots=True)
class Loops:
    kind: str
    post: Any
    drain: Any
    rest: Any


def _bound(function: Any, calls: dict[str, Any]) -> FunctionType:
    """The same code with other globals: its foreign calls are `calls`."""
    bound = FunctionType(function.__code__, {**vars(loops), **calls}, function.__name__)
    bound.__module__, bound.__qualname__ = loops.__name__, function.__qualname__
    return bound


@cache
def _interpreted() -> Loops:
    read_type = c.CFUNCTYPE(c.c_ssize_t, c.c_void_p, c.c_void_p, c.c_size_t)
    ppoll_type = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_ulong, c.c_void_p, c.c_void_p)
    at = cache(lambda kind, address: kind(address))

    def call(kind: Any) -> Any:
        return lambda function, *arguments: at(kind, int(function))(*map(int, arguments))

    calls = {"call_write": call(abi.WRITEDATA), "call_read": call(read_type), "call_ppoll": call(ppoll_type)}
    return Loops("ctypes", *(_bound(f, calls) for f in (loops.post, loops.drain, loops.rest)))


@cache
def _compiled() -> Loops:
    import numba
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    i64, array = numba.int64, numba.int64[::1]
    tuples: Any = types

    def foreign(arity: int, result_bits: int) -> Any:
        """An intrinsic that calls the address given first; System V passes all arguments as 64-bit integers."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = ir.IntType(64)
            kind = ir.FunctionType(ir.IntType(result_bits), [word] * arity)
            result = builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
            return result if result_bits == 64 else builder.sext(result, word)

        return lambda *_: (types.int64(*[types.int64] * (arity + 1)), generate)

    write, read, ppoll = foreign(9, 64), foreign(3, 64), foreign(4, 32)

    @intrinsic  # type: ignore[untyped-decorator]
    def call_write(typing: Any, f: Any, a: Any, b: Any, d: Any, e: Any, g: Any, h: Any, i: Any, j: Any, k: Any) -> Any:
        return write()

    @intrinsic  # type: ignore[untyped-decorator]
    def call_read(typing: Any, f: Any, a: Any, b: Any, d: Any) -> Any:
        return read()

    @intrinsic  # type: ignore[untyped-decorator]
    def call_ppoll(typing: Any, f: Any, a: Any, b: Any, d: Any, e: Any) -> Any:
        return ppoll()

    calls = {"call_write": call_write, "call_read": call_read, "call_ppoll": call_ppoll}
    pair, triple = tuples.UniTuple(i64, 2), tuples.UniTuple(i64, 3)
    signatures = (
        (loops.post, pair(*[i64] * 9, array, i64, i64, array, *[i64] * 4, array, array, array)),
        (loops.drain, triple(i64, i64, array, i64, i64, i64, *[array] * 5)),
        (loops.rest, triple(array, array, array, *[i64] * 6, array, i64, array, i64)),
    )
    return Loops("numba", *(numba.njit(s, nogil=True, cache=True)(_bound(f, calls)) for f, s in signatures))


def bind_loops(calls: Calls = "auto") -> Loops:
    """`auto` takes numba where it is installed. Raises ImportError if numba is asked for and missing."""
    if calls == "ctypes":
        return _interpreted()
    try:
        return _compiled()
    except ImportError:
        if calls == "numba":
            raise
        return _interpreted()


class Slots:
    """The outstanding writes of one lane, at most `depth`."""

    def __init__(self, depth: int) -> None:
        self._memory = np.zeros(depth * abi.CONTEXT_BYTES, np.uint8)
        self.contexts = int(self._memory.ctypes.data)
        self.owner = np.zeros(depth, np.int64)
        self.free = np.arange(depth, dtype=np.int64)[::-1].copy()
        self.top = np.array([depth], np.int64)

    @property
    def available(self) -> int:
        return int(self.top[0])

    def release(self, context: int) -> int | None:
        """Frees the slot of a failed write; returns its ticket, None if the context is not one of ours."""
        slot, rest = divmod(context - self.contexts, abi.CONTEXT_BYTES)
        if rest or not 0 <= slot < len(self.owner):
            return None
        self.free[self.top[0]] = slot
        self.top[0] += 1
        return int(self.owner[slot])


@dataclass(frozen=True, slots=True)
class Drained:
    tickets: NDArray[np.int64]
    imms: NDArray[np.int64]
    code: int


class Poster:
    """Posts to one endpoint and drains its completion queue."""

    def __init__(self, bound: Loops, ep: int, write: int, cq: int, read: int) -> None:
        self._loops, self._ep, self._write, self.cq, self.read = bound, ep, write, cq, read
        self._entries = np.zeros(ENTRIES * abi.CQ_ENTRY_WORDS, np.int64)
        self.buffer = int(self._entries.ctypes.data)
        self._tickets = np.zeros(_OUTPUTS, np.int64)
        self._imms = np.zeros(_OUTPUTS, np.int64)

    def post(self, order: Order, desc: int, dest: int, start: int, ticket: int, slots: Slots) -> tuple[int, int]:
        """Posts from write `start` on. Returns (how many were posted, code of the call that ended it)."""
        o = order
        posted, code = self._loops.post(
            self._write, self._ep, desc, _signed(dest), _signed(o.key), o.imm, o.block_bytes,
            o.source, o.source_stride, o.source_index, _signed(o.target), o.target_stride, o.target_index,
            start, len(o.source_index), ticket, slots.contexts, slots.owner, slots.free, slots.top,
        )  # fmt: skip
        return int(posted), int(code)

    def drain(self, slots: Slots, count: int = 0) -> Drained:
        """`count`: entries that `Rest` left in the buffer. The arrays are copies."""
        tickets, imms, code = self._loops.drain(
            self.read, self.cq, self._entries, self.buffer, count,
            slots.contexts, slots.owner, slots.free, slots.top, self._tickets, self._imms,
        )  # fmt: skip
        return Drained(self._tickets[:tickets].copy(), self._imms[:imms].copy(), int(code))


class Rest:
    """Waits for completions on any of several queues, or to be woken. `wake` may be called from any thread."""

    def __init__(self, bound: Loops) -> None:
        self._loops = bound
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pollfd = np.array([self._event | _POLLIN << 32], np.int64)
        self._timespec = np.zeros(2, np.int64)
        self._queues = np.zeros((3, 0), np.int64)

    def watch(self, posters: list[Poster]) -> None:
        rows = [[p.read for p in posters], [p.cq for p in posters], [p.buffer for p in posters]]
        self._queues = np.array(rows, np.int64).reshape(3, len(posters))

    def __call__(self, spins: int, sleep_ns: int, longest_ns: int, total_ns: int) -> tuple[int, int, int]:
        """See `loops.rest`."""
        reads, cqs, buffers = self._queues
        queue, code, sleep_ns = self._loops.rest(
            reads, cqs, buffers, ENTRIES, spins, sleep_ns, longest_ns, total_ns, _PPOLL,
            self._pollfd, self._pollfd.ctypes.data, self._timespec, self._timespec.ctypes.data,
        )  # fmt: skip
        if queue == -2:
            os.eventfd_read(self._event)
        return int(queue), int(code), int(sleep_ns)

    def wake(self) -> None:
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Idempotent."""
        if self._event >= 0:
            os.close(self._event)
            self._event = -1


def precise_sleep() -> None:
    """Lets this thread sleep for tens of microseconds: by default the kernel adds up to 50."""
    _LIBC.prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def _signed(value: int) -> int:
    """A 64-bit pattern as numba's int64."""
    return value - (1 << 64) if value >= 1 << 63 else value
