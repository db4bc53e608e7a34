"""Settings of the whole test run; hardware marks live here and nowhere else."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from hypothesis import settings

# Before anything imports numpy or torch: two cores run the tests, and threads that fight for them only add noise.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may ask the network for a model

# Deadlines measure the machine's other load, not the code.
settings.register_profile("pdserve", deadline=None, print_blob=True)
settings.load_profile("pdserve")


def _has_nvidia_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_nvidia_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
