"""From a model's name or directory to a model: weights mapped, never copied per process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from pdserve.config import EMBEDDED_MODEL
from pdserve.models.api import ModelConfig
from pdserve.models.build import Builder
from pdserve.models.checkpoint import Checkpoint, open_checkpoint
from pdserve.models.decoder import Decoder, Runtime
from pdserve.models.embedded import embedded_model_dir
from pdserve.models.files import file_lock
from pdserve.models.safetensors_file import TensorEntry, open_tensors, write_tensors
from pdserve.models.step import Scratch
from pdserve.models.weights import WeightReader
from pdserve.ops.api import Needs, Ops
from pdserve.ops.choice import choose_ops
from pdserve.parallel.group import ModelParallel
from pdserve.paths import cache_dir

Dtype = Literal["bf16", "fp32"]
Progress = Callable[[str], None]

_log = logging.getLogger(__name__)
_STORED = {"bf16": "BF16", "fp32": "F32"}
_ROUTER = ".mlp.gate.weight"  # stays as it is stored: rounding it could send a row to another expert


def model_dir(path_or_name: str | Path, progress: Progress | None = None) -> Path:
    """The directory of a model; the embedded one is made on first use (about 10 seconds)."""
    if str(path_or_name) == EMBEDDED_MODEL:
        return embedded_model_dir(progress)
    return Path(path_or_name)


def read_config(path_or_name: str | Path, progress: Progress | None = None) -> ModelConfig:
    """Shape and fingerprint of a model, without preparing its weights. Raises ModelError."""
    return open_checkpoint(model_dir(path_or_name, progress)).config


def load_model(
    path_or_name: str | Path,
    dtype: Dtype,
    *,
    deterministic: bool = True,
    ops: Ops | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """Loads a local Hugging Face directory or the embedded model.

    Where the files are not in `dtype`, they are converted once into the cache directory. `progress` gets a line for
    whatever may take more than a second (conversion, kernel compilation). Raises ModelError.
    """
    report = progress or _log.info
    return _load(_Wanted(model_dir(path_or_name, report), dtype, deterministic, ModelParallel(), report), ops)


def load_rank(
    path_or_name: str | Path,
    dtype: Dtype,
    parallel: ModelParallel,
    *,
    deterministic: bool = True,
    progress: Progress | None = None,
) -> Decoder:
    """As `load_model`: one rank's part of a model that several ranks compute together.

    Rows of matrices stay views of the mapped files; of columns the rank's share is copied. Raises ModelError, also
    where that many ranks cannot share the model.
    """
    report = progress or _log.info
    return _load(_Wanted(model_dir(path_or_name, report), dtype, deterministic, parallel, report), None)


@dataclass(frozen=True, slots=True)
class _Wanted:
    path: Path
    dtype: Dtype
    deterministic: bool
    parallel: ModelParallel
    report: Progress


def _load(wanted: _Wanted, ops: Ops | None) -> Decoder:
    checkpoint = open_checkpoint(wanted.path)
    config = checkpoint.config
    reader = WeightReader(checkpoint, _tensors_in(checkpoint, wanted.dtype, wanted.report), wanted.parallel)
    needs = Needs(latents=config.latent is not None, experts=config.experts is not None)
    chosen = ops or choose_ops(wanted.dtype, wanted.deterministic, config.head_dim, wanted.report, needs)
    return Builder(reader, checkpoint.rope, Runtime(chosen, Scratch(), wanted.parallel)).model()


def _tensors_in(checkpoint: Checkpoint, dtype: Dtype, report: Progress) -> dict[str, NDArray[Any]]:
    """The checkpoint's matrices as `dtype`, mapped from its own files or from a converted copy in the cache.

    Vectors are as they are stored: they are few, and kernels take them as float32.
    """
    stored = {name: entry.data for name, entry in checkpoint.tensors.items()}
    foreign = {name: entry.data for name, entry in checkpoint.tensors.items() if _is_foreign(name, entry, dtype)}
    if not foreign:
        return stored
    config = checkpoint.config
    copy = cache_dir() / "models" / "converted" / f"{config.name}-{config.fingerprint[:16]}-{dtype}.safetensors"
    if not copy.exists():
        with file_lock(copy):
            if not copy.exists():
                report(f"converting {config.name} to {dtype} (once, into {copy.parent})")
                write_tensors(copy, foreign, dtype)
    converted = open_tensors(copy)
    return stored | {name: converted[name].data for name in foreign}


def _is_foreign(name: str, entry: TensorEntry, dtype: Dtype) -> bool:
    if len(entry.shape) < 2 or (name.endswith(_ROUTER) and entry.dtype != "F16"):
        return False
    return entry.dtype != _STORED[dtype]
