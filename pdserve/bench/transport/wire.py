"""How the benchmark talks to its sides: one JSON document a line, over pipes or a socket. Bytes travel as hex."""

from __future__ import annotations

import json
from typing import Any, BinaryIO


def write(stream: BinaryIO, value: Any) -> None:
    stream.write(json.dumps(value, default=_packed).encode() + b"\n")
    stream.flush()


def read(line: bytes) -> Any:
    """Raises EOFError for the empty line that a closed stream gives."""
    if not line:
        raise EOFError("the other side of the benchmark has ended")
    return json.loads(line, object_hook=_unpacked)


def _packed(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    raise TypeError(f"{type(value).__name__} cannot be sent to the other side")


def _unpacked(value: dict[str, Any]) -> Any:
    return bytes.fromhex(value["hex"]) if set(value) == {"hex"} else value
