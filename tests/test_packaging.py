"""The repository's own promises: what the wheel carries, which layer each room is in, that the lock is complete."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {"pdserve", "actors", "transport", "policies"}


def locked_versions() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    matches = [re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!]+)", line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if not match]
    return {canonicalize_name(match[1]): match[2] for match in matches if match}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def test_the_wheel_has_exactly_the_four_packages(wheel: zipfile.ZipFile) -> None:
    top_level = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top_level if not name.endswith(".dist-info")} == PACKAGES
    assert not [name for name in wheel.namelist() if "__pycache__" in name]


def test_the_wheel_refuses_upload_and_names_its_licence(wheel: zipfile.ZipFile) -> None:
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    text = wheel.read(metadata).decode()
    assert "Classifier: Private :: Do Not Upload" in text
    assert "License-Expression: Apache-2.0" in text


def test_every_room_has_a_layer() -> None:
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    placed = set(re.findall(r"[a-z_.]+", " ".join(layers)))
    rooms = {f"pdserve.{path.stem}" for path in (ROOT / "pdserve").iterdir() if path.suffix == ".py" or path.is_dir()}
    rooms -= {"pdserve.__init__", "pdserve.__main__", "pdserve.__pycache__"}
    assert rooms | (PACKAGES - {"pdserve"}) <= placed, "place new rooms in tool.importlinter of pyproject.toml"


def requirement_closure(requirements: list[str]) -> dict[str, Distribution]:
    """The installed distributions that these requirements bring in this environment, by name."""
    closure: dict[str, Distribution] = {}
    waiting = [(Requirement(text), frozenset[str]()) for text in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement, extras = waiting.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            continue
        asked = frozenset(requirement.extras)
        if (requirement.name, asked) in seen:
            continue
        seen.add((requirement.name, asked))
        found = distribution(requirement.name)
        closure[canonicalize_name(requirement.name)] = found
        waiting += [(Requirement(text), asked) for text in found.requires or ()]
    return closure


def test_the_lock_holds_every_package_that_the_project_brings() -> None:
    project = PYPROJECT["project"]
    locked = locked_versions()
    try:
        closure = requirement_closure([*project["dependencies"], *project["optional-dependencies"]["dev"]])
    except PackageNotFoundError as missing:
        pytest.skip(f"{missing}: this environment is not one that `make setup` made")
    # A CPU or a CUDA build may stand in for the locked torch; a CUDA build brings libraries at versions of its own.
    absent = {name for name in closure if name not in locked and not name.startswith(("nvidia-", "triton", "cuda-"))}
    assert not absent, f"renew constraints.txt, it lacks {sorted(absent)}"


@pytest.mark.parametrize("name", ["help", "setup", "demo", "serve", "test", "test-full", "lint", "bench"])
def test_make_knows_its_targets(name: str) -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(rf"^  make {name} ", listed, re.MULTILINE)


def test_ci_runs_what_people_run() -> None:
    text = (ROOT / ".ci" / "run").read_text()
    assert "make lint" in text and "make test" in text
    assert "make lint" in (ROOT / ".pre-commit-config.yaml").read_text()


def test_the_top_level_stays_as_agreed() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    top_level = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    allowed = PACKAGES | {"tests", "clusters", "notebooks", "Makefile", "constraints.txt", "pyproject.toml", "LICENSE"}
    allowed |= {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert {name for name in top_level if not name.startswith(".")} <= allowed
