"""Binds the loops to numba or to ctypes."""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, Literal

from transport.ucx import abi, loops

Calls = Literal["auto", "numba", "ctypes"]

_I64 = c.c_int64
_KINDS: dict[str, tuple[Any, int]] = {
    "call_progress": (c.c_uint32, 1),
    "call_put": (_I64, 6),
    "call_flush": (_I64, 2),
    "call_tell": (_I64, 7),
    "call_check": (abi.status_t, 1),
    "call_free": (None, 1),
    "call_arm": (abi.status_t, 1),
    "call_copy": (_I64, 3),
    "call_ppoll": (c.c_int32, 4),
}
"""Result and number of arguments of each foreign call; every argument is a 64-bit integer or fits one."""


@dataclass(frozen=True, slots=True)
class Loops:
    """The bound loops, and the addresses of the functions that UCX calls."""

    kind: str
    bodies: tuple[Any, ...]
    """The bound functions `post`, `pump`, `discard` and `rest`."""
    callbacks: tuple[Any, ...]
    """What the addresses point into."""
    on_immediate: int
    on_frame: int
    on_error: int

    @property
    def post(self) -> Any:
        return self.bodies[0]

    @property
    def pump(self) -> Any:
        return self.bodies[1]

    @property
    def discard(self) -> Any:
        return self.bodies[2]

    @property
    def rest(self) -> Any:
        return self.bodies[3]


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


def _bound(function: Any, names: dict[str, Any]) -> FunctionType:
    """The same code with other globals: its foreign calls are `names`."""
    bound = FunctionType(function.__code__, {**vars(loops), **names}, function.__name__)
    bound.__module__, bound.__qualname__ = loops.__name__, function.__qualname__
    return bound


@cache
def _interpreted() -> Loops:
    at = cache(lambda kind, address: kind(address))

    def call(kind: Any) -> Any:
        return lambda function, *arguments: at(kind, int(function))(*map(int, arguments))

    names: dict[str, Any] = {
        name: call(c.CFUNCTYPE(result, *[_I64] * arity)) for name, (result, arity) in _KINDS.items()
    }
    names["load"] = lambda address: _I64.from_address(int(address)).value
    names["store"] = lambda address, value: setattr(_I64.from_address(int(address)), "value", int(value))
    for helper in (loops.settle, loops.answer):
        names[helper.__name__] = _bound(helper, names)
    bodies = tuple(_bound(f, names) for f in (loops.post, loops.pump, loops.discard, loops.rest))
    callbacks = (
        abi.ON_MESSAGE(_bound(loops.on_immediate, names)),
        abi.ON_MESSAGE(_bound(loops.on_frame, names)),
        abi.ON_ERROR(_bound(loops.on_error, names)),
    )
    addresses = [c.cast(callback, c.c_void_p).value or 0 for callback in callbacks]
    return Loops("ctypes", bodies, callbacks, *addresses)


@cache
def _compiled() -> Loops:
    import numba
    from numba.core import types

    kinds: Any = types
    i64, vector, table = kinds.int64, kinds.int64[::1], kinds.int64[:, ::1]
    names = _intrinsics()
    for helper in (loops.settle, loops.answer):
        names[helper.__name__] = numba.njit(nogil=True, cache=True)(_bound(helper, names))
    pair, triple = kinds.UniTuple(i64, 2), kinds.UniTuple(i64, 3)
    signatures = (
        (loops.post, pair(vector, vector, vector, vector, vector, i64, i64, table, table)),
        (loops.pump, triple(vector, vector, table, vector)),
        (loops.discard, i64(vector, table)),
        (loops.rest, i64(vector, vector, vector, i64, vector, i64, i64, i64)),
    )
    bodies = tuple(numba.njit(s, nogil=True, cache=True)(_bound(f, names)) for f, s in signatures)
    on_message, on_error = kinds.int8(*[i64] * 6), kinds.void(i64, i64, kinds.int8)
    callbacks = tuple(
        numba.cfunc(s, cache=True)(_bound(f, names))
        for f, s in ((loops.on_immediate, on_message), (loops.on_frame, on_message), (loops.on_error, on_error))
    )
    addresses = [int(callback.address) for callback in callbacks]
    return Loops("numba", bodies, callbacks, *addresses)


def _intrinsics() -> dict[str, Any]:
    """numba's view of the foreign calls and memory accesses: calls of the address given first, loads and stores."""
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    kinds: Any = types
    word = ir.IntType(64)

    def calling(result: Any, arity: int) -> Any:
        bits = 8 * c.sizeof(result) if result is not None else 64
        signed = result is not c.c_uint32

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.FunctionType(ir.IntType(bits), [word] * arity)
            value = builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
            if bits == 64:
                return value
            return builder.sext(value, word) if signed else builder.zext(value, word)

        names = ", ".join(f"a{i}" for i in range(arity))
        scope = {"answer": (kinds.int64(*[kinds.int64] * (arity + 1)), generate)}
        exec(f"def foreign(typing, f, {names}): return answer", scope)
        return intrinsic(scope["foreign"])

    @intrinsic  # type: ignore[untyped-decorator]
    def load(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(builder.inttoptr(arguments[0], word.as_pointer()))

        return kinds.int64(kinds.int64), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def store(typing: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.store(arguments[1], builder.inttoptr(arguments[0], word.as_pointer()))
            return context.get_dummy_value()

        return kinds.void(kinds.int64, kinds.int64), generate

    return {"load": load, "store": store, **{name: calling(*kind) for name, kind in _KINDS.items()}}
