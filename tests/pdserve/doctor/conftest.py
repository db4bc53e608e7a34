from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pdserve.doctor.made_up import Machine
from tests.transport import fake_sysfs

Shape = Callable[[Path], fake_sysfs.FakeSysfs]


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[Shape], Machine]:
    return lambda shape: Machine(tmp_path / "machine", shape)


@pytest.fixture
def box(tmp_path: Path) -> Machine:
    """Four GPUs and two RoCE NICs; all is well."""
    return Machine(tmp_path / "box", fake_sysfs.pcie_box)


@pytest.fixture
def plain(tmp_path: Path) -> Machine:
    """Neither GPU nor RDMA."""
    return Machine(tmp_path / "plain", fake_sysfs.plain_server)
