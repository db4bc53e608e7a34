"""Binds the loops to numba or to ctypes, and owns the arrays that they work on."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from types import FunctionType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transport.fabric import abi, loops
from transport.fabric.endpoint import Endpoint
from transport.fabric.slots import Slots
from transport.transfer import Order

Calls = Literal["auto", "numba", "ctypes"]

CLOCK = abi.address_of(c.CDLL(None).clock_gettime)
ENTRIES = 256
"""Completions read by one call."""
_OUTPUTS = 4 * ENTRIES
NOTHING = np.zeros(0, np.int64)


class Scratch:
    """What the loops of one thread read completions into, and put out; taken before the next call."""

    def __init__(self) -> None:
        self.entries = np.zeros(ENTRIES * abi.CQ_ENTRY_WORDS, np.int64)
        self.address = int(self.entries.ctypes.data)
        self.words = self.entries.data
        """The entries, for who takes a few by himself: `abi.CQ_ENTRY_WORDS` words each."""
        self.tickets = np.zeros(_OUTPUTS, np.int64)
        self.imms = np.zeros(_OUTPUTS, np.int64)
        self.events = np.zeros(2 * _OUTPUTS, np.int64)
        self.kept = np.zeros(_OUTPUTS * (abi.CQ_ENTRY_WORDS + 1), np.int64)
        self.filled = np.zeros(3, np.int64)
        self.timespec = np.zeros(2, np.int64)
        self.timespec_address = int(self.timespec.ctypes.data)


@dataclass(frozen=True, slots=True)
class Loops:
    """For one thread."""

    kind: str
    peek: Any
    post: Any
    post_one: Any
    drain: Any
    stream: Any
    rest: Any
    scratch: Scratch = field(default_factory=Scratch)


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

    trywait_type = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_int)
    calls = {
        "call_write": call(abi.WRITEDATA),
        "call_read": call(read_type),
        "call_ppoll": call(ppoll_type),
        "call_trywait": call(trywait_type),
        "call_clock": call(c.CFUNCTYPE(c.c_int, c.c_int, c.c_void_p)),
    }
    return _together("ctypes", calls, lambda function: function)


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

    write, read, ppoll, trywait = foreign(9, 64), foreign(3, 64), foreign(4, 32), foreign(3, 32)
    clock = foreign(2, 32)

    @intrinsic  # type: ignore[untyped-decorator]
    def call_write(typing: Any, f: Any, a: Any, b: Any, d: Any, e: Any, g: Any, h: Any, i: Any, j: Any, k: Any) -> Any:
        return write()

    @intrinsic  # type: ignore[untyped-decorator]
    def call_read(typing: Any, f: Any, a: Any, b: Any, d: Any) -> Any:
        return read()

    @intrinsic  # type: ignore[untyped-decorator]
    def call_ppoll(typing: Any, f: Any, a: Any, b: Any, d: Any, e: Any) -> Any:
        return ppoll()

    @intrinsic  # type: ignore[untyped-decorator]
    def call_trywait(typing: Any, f: Any, a: Any, b: Any, d: Any) -> Any:
        return trywait()

    @intrinsic  # type: ignore[untyped-decorator]
    def call_clock(typing: Any, f: Any, a: Any, b: Any) -> Any:
        return clock()

    calls = {
        "call_write": call_write,
        "call_read": call_read,
        "call_ppoll": call_ppoll,
        "call_trywait": call_trywait,
        "call_clock": call_clock,
    }
    pair, triple, five = (tuples.UniTuple(i64, n) for n in (2, 3, 5))
    run = (*[i64] * 9, array, i64, i64, array, *[i64] * 4, array, array, array)
    signatures = {
        "peek": i64(i64, i64, i64, i64),
        "post": pair(*run),
        "post_one": i64(array, i64, array, array, array),
        "take": i64(array, i64, i64, i64, *[array] * 7),
        "drain": i64(i64, i64, array, i64, i64, i64, i64, *[array] * 7),
        "stream": triple(*run, i64, i64, i64, array, i64, i64, *[array] * 4, i64, i64, array, i64),
        "rest": five(i64[:, ::1], i64, array, i64, *[array] * 4, i64, array, *[i64] * 6, array, i64, i64, array, i64),
    }
    return _together("numba", calls, lambda f: numba.njit(signatures[f.__name__], nogil=True, cache=True)(f))


def _together(kind: str, calls: dict[str, Any], finish: Callable[[FunctionType], Any]) -> Loops:
    """Each is bound after those that it calls."""
    bound = dict(calls)
    for function in (loops.peek, loops.post, loops.post_one, loops.take, loops.drain, loops.stream, loops.rest):
        bound[function.__name__] = finish(_bound(function, bound))
    return Loops(kind, *(bound[name] for name in ("peek", "post", "post_one", "drain", "stream", "rest")))


def bind_loops(calls: Calls = "auto") -> Loops:
    """`auto` takes numba where it is installed. Raises ImportError if numba is asked for and missing."""
    if calls == "ctypes":
        return replace(_interpreted(), scratch=Scratch())
    try:
        return replace(_compiled(), scratch=Scratch())
    except ImportError:
        if calls == "numba":
            raise
        return replace(_interpreted(), scratch=Scratch())


class Run(NamedTuple):
    """What one call posts: writes `start:stop` of an order, each `block_bytes` long, to one destination.

    `source` is the address that their offsets count from and `desc` its local descriptor; `dest` and `key` are the
    peer's.
    """

    order: Order
    start: int
    stop: int
    block_bytes: int
    ticket: int
    source: int
    desc: int
    dest: int
    key: int


Request = NDArray[np.int64]
"""`(10,)`: function, endpoint, source, length, desc, immediate, dest, target, key, contexts."""


class Drained(NamedTuple):
    """`events` are messages that were sent or have come: `(n, 2) int64`, message slot and length."""

    tickets: NDArray[np.int64]
    imms: NDArray[np.int64]
    events: NDArray[np.int64]
    code: int


class Poster:
    """Posts to one endpoint and drains its completion queue."""

    def __init__(self, bound: Loops, endpoint: Endpoint) -> None:
        self._loops = bound
        self._ep, self._write = endpoint.ep, endpoint.writedata
        self.cq, self.read, self.wait_fd = endpoint.cq, endpoint.cq_read, endpoint.wait_fd
        self.fabric, self.trywait = endpoint.fabric, endpoint.trywait
        self._scratch = bound.scratch
        self.words = bound.scratch.words

    def post(self, run: Run, slots: Slots) -> tuple[int, int]:
        """Posts while slots last. Returns (how many were posted, code of the call that ended it)."""
        o = run.order
        posted, code = self._loops.post(
            self._write, self._ep, run.desc, _signed(run.dest), _signed(run.key), o.imm, run.block_bytes,
            run.source, o.source_stride, o.source_index, _signed(o.target), o.target_stride, o.target_index,
            run.start, run.stop, run.ticket, slots.contexts, slots.owner, slots.free, slots.top,
        )  # fmt: skip
        return posted, code

    def request(self, run: Run, slots: Slots) -> Request:
        """The first write of a run, made ready to be posted by itself, any number of times."""
        o = run.order
        source = run.source + o.source_stride * int(o.source_index[run.start])
        target = o.target + o.target_stride * int(o.target_index[run.start])
        words = (self._write, self._ep, source, run.block_bytes, run.desc, o.imm, run.dest, target, run.key)
        return np.array([_signed(word) for word in (*words, slots.contexts)], np.int64)

    def post_one(self, request: Request, ticket: int, slots: Slots) -> int:
        """The call's code. There must be a slot."""
        code: int = self._loops.post_one(request, ticket, slots.owner, slots.free, slots.top)
        return code

    def peek(self) -> int:
        """Reads the queue into the buffer: how many entries, which `drain` must take next, or a negative code."""
        code: int = self._loops.peek(self.read, self.cq, self._scratch.address, ENTRIES)
        return code

    def drain(self, slots: Slots, count: int = 0) -> Drained:
        """`count`: entries that `peek` or `Rest` left in the buffer. The arrays are copies."""
        out = self._scratch
        code = self._loops.drain(
            self.read, self.cq, out.entries, out.address, count, slots.contexts, slots.total,
            slots.owner, slots.free, slots.top, out.tickets, out.imms, out.events, out.filled,
        )  # fmt: skip
        return self._drained(code)

    def stream(self, run: Run, slots: Slots, room: int, slice_ns: int) -> tuple[int, int, Drained]:
        """Posts, and drains while it waits for room, for a while; see `loops.stream`, `post` and `drain`."""
        o, out = run.order, self._scratch
        posted, code, read = self._loops.stream(
            self._write, self._ep, run.desc, _signed(run.dest), _signed(run.key), o.imm, run.block_bytes,
            run.source, o.source_stride, o.source_index, _signed(o.target), o.target_stride, o.target_index,
            run.start, run.stop, run.ticket, slots.contexts, slots.owner, slots.free, slots.top, room,
            self.read, self.cq, out.entries, out.address, slots.total, out.tickets, out.imms, out.events, out.filled,
            slice_ns, CLOCK, out.timespec, out.timespec_address,
        )  # fmt: skip
        return posted, code, self._drained(read)

    def _drained(self, code: int) -> Drained:
        out = self._scratch
        tickets, imms, events = out.filled.tolist()
        return Drained(
            out.tickets[:tickets].copy() if tickets else NOTHING,
            out.imms[:imms].copy() if imms else NOTHING,
            out.events[: 2 * events].reshape(-1, 2).copy() if events else NOTHING,
            code,
        )


def _signed(value: int) -> int:
    """A 64-bit pattern as numba's int64."""
    return value - (1 << 64) if value >= 1 << 63 else value
