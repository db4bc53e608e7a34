"""Safetensors files, mapped: tensors are views of the page cache, shared by every process that maps the file.

Format: 8 bytes little-endian header length, a JSON header, then raw row-major data (source: the safetensors README).
bf16 is seen as uint16.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pdserve.errors import ModelError

Array = NDArray[Any]

_DTYPES: dict[str, type[np.generic]] = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16}
_NAMES = {"fp32": "F32", "bf16": "BF16"}
_MAX_HEADER_BYTES = 100_000_000
_CHUNK_ELEMENTS = 4_194_304


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as the header states it."""

    dtype: str  # "F32", "BF16" or "F16"
    shape: tuple[int, ...]
    data: Array  # read-only view of the mapping


def open_tensors(path: Path) -> dict[str, TensorEntry]:
    """All tensors of a file. The mapping lives as long as one of the views. Raises ModelError."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot map {path}: {error}") from error
    return dict(_entries(path, mapped))


def _entries(path: Path, mapped: mmap.mmap) -> Iterator[tuple[str, TensorEntry]]:
    header_bytes = int.from_bytes(mapped[:8], "little")
    if len(mapped) < 8 or not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, len(mapped) - 8):
        raise ModelError(f"{path} is not a safetensors file (or it is cut short)")
    try:
        header = json.loads(mapped[8 : 8 + header_bytes])
    except ValueError as error:
        raise ModelError(f"{path} is not a safetensors file: its header is not JSON") from error
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, _entry(path, mapped, name, (entry, 8 + header_bytes))


def _entry(path: Path, mapped: mmap.mmap, name: str, found: tuple[Mapping[str, Any], int]) -> TensorEntry:
    entry, data_start = found
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ModelError(f"{path}: tensor {name} is {entry['dtype']}; supported are {', '.join(_DTYPES)}")
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    count = int(np.prod(shape, dtype=np.int64))
    if end - start != count * np.dtype(dtype).itemsize or data_start + end > len(mapped):
        raise ModelError(f"{path}: tensor {name} does not fit the file; it is damaged or cut short")
    data = np.frombuffer(mapped, dtype=dtype, count=count, offset=data_start + start).reshape(shape)
    return TensorEntry(entry["dtype"], shape, data)


def write_tensors(
    path: Path,
    tensors: Mapping[str, Array],
    dtype: str,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Writes tensors (float32, float16, or bf16 seen as uint16) as `dtype` ("fp32" or "bf16"); atomic by rename."""
    element_bytes = 2 if dtype == "bf16" else 4
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(tensors):
        size = tensors[name].size * element_bytes
        header[name] = {
            "dtype": _NAMES[dtype], "shape": list(tensors[name].shape), "data_offsets": [offset, offset + size]
        }  # fmt: skip
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for done, name in enumerate(sorted(tensors)):
                _write_converted(file, tensors[name].reshape(-1), dtype)
                if progress is not None:
                    progress((done + 1) / len(tensors))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_converted(file: BinaryIO, flat: Array, dtype: str) -> None:
    for start in range(0, flat.size, _CHUNK_ELEMENTS):
        converted = convert(flat[start : start + _CHUNK_ELEMENTS], dtype)
        file.write(np.ascontiguousarray(converted).data)


def convert(array: Array, dtype: str) -> Array:
    """float32, float16 or bf16 (uint16) as "fp32" (float32) or "bf16" (uint16, rounded to nearest even)."""
    if dtype == "bf16":
        return array if array.dtype == np.uint16 else _to_bf16(array.astype(np.float32))
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def _to_bf16(array: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40  # rounding could carry a NaN into infinity
    return np.where(np.isnan(array), quiet, rounded).astype(np.uint16)
