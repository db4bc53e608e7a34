"""A rank's weights out of a checkpoint: parts of mapped tensors, checked against the shapes that config.json asks for.

Rows are views of the mapping, which ranks on one host share. Columns are copied: their share only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.errors import ModelError
from pdserve.models.checkpoint import Checkpoint
from pdserve.models.safetensors_file import convert
from pdserve.ops.api import Floats, Weights
from pdserve.parallel.group import ModelParallel


class WeightReader:
    """`tensors` are the checkpoint's in the dtype that the kernels take."""

    def __init__(self, checkpoint: Checkpoint, tensors: Mapping[str, NDArray[Any]], parallel: ModelParallel) -> None:
        self.config = checkpoint.config
        self.parallel = parallel
        self._checkpoint = checkpoint
        self._tensors = tensors
        self._stored = {name: entry.data for name, entry in checkpoint.tensors.items()}

    def matrix(self, name: str, rows: int, columns: int) -> Weights:
        return self._checked(self._tensors, name, (rows, columns))

    def rows(self, name: str, shape: tuple[int, int], part: slice) -> Weights:
        """Outputs `part` of a matrix."""
        return self.matrix(name, *shape)[part]

    def columns(self, name: str, shape: tuple[int, int], part: slice) -> Weights:
        """Inputs `part` of a matrix."""
        found = self.matrix(name, *shape)[:, part]
        if found.flags.c_contiguous:
            return found
        copied = np.ascontiguousarray(found)
        copied.flags.writeable = False  # as mapped weights are: kernels are compiled for these
        return copied

    def vector(self, name: str, size: int) -> Floats:
        """A norm or bias: always float32, from the checkpoint's own files."""
        return np.array(convert(self._checked(self._stored, name, (size,)), "fp32"), np.float32)

    def behind(self, layers: int) -> dict[str, Weights]:
        """Tensors of layers from `layers` on, by name."""
        found = {}
        for name, tensor in self._tensors.items():
            pieces = name.split(".")
            if pieces[:2] == ["model", "layers"] and pieces[2].isdigit() and int(pieces[2]) >= layers:
                found[name] = tensor
        return found

    def _checked(self, tensors: Mapping[str, NDArray[Any]], name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        found, path = tensors.get(name), self._checkpoint.path
        if found is None:
            raise ModelError(f"{path}: no tensor {name!r} in its safetensors files")
        if found.shape != shape:
            raise ModelError(f"{path}: tensor {name} is {found.shape}, config.json asks for {shape}")
        return found
