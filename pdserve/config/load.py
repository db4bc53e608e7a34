"""Settings from a file and the command line: what overrides what, and what is told of faults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pdserve.config.deployment import KINDS, as_kind, is_count
from pdserve.config.settings import Settings
from pdserve.errors import ConfigError
from pdserve.validation import describe, key_names, sections

_NODES = tuple(f"deployment.{kind}" for kind in KINDS)


def load_settings(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Settings from a YAML file (or the defaults), with dotted overrides such as `{"engine.dtype": "fp32"}`.

    A number of nodes overrides the count alone: what the file says of their ranks stays. Overrides that ask for nodes
    of one sort set aside the file's nodes of the other, so that `deployment.colocated` can be asked of any file; a
    preset sets aside all of the file's nodes. Raises ConfigError with one line that holds every fault.
    """
    overrides = dict(_counts_spelled_out(overrides or {}))
    tree = _read_tree(Path(path)) if path is not None else {}
    _set_aside_other_sort(tree, overrides)
    if overrides.get("deployment.preset") and isinstance(tree.get("deployment"), dict):
        tree["deployment"] = {key: value for key, value in tree["deployment"].items() if key not in KINDS}
    for dotted, value in overrides.items():
        _put(tree, dotted, value)
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        prefix = "" if path is None else f"{path}: "
        raise ConfigError(prefix + describe(error, Settings, frozenset(overrides))) from error


def parse_override(text: str) -> tuple[str, Any]:
    """`engine.page_size=16` to its dotted key and its value, read as a YAML scalar. Raises ConfigError."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{text!r} is not of the form key=value, for example engine.dtype=fp32")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key.strip()}: {value!r} cannot be read as a YAML value") from error


class _StrictKeyLoader(yaml.SafeLoader):
    """YAML lets a key appear twice, or be no text; in settings that is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} appears twice", problem_mark=key_node.start_mark)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"key {key!r} must be text", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_tree(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _StrictKeyLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {_yaml_fault(error)}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{path}: must hold a mapping of sections ({key_names(Settings)}), not a {type(loaded).__name__}"
        )
    # A section whose keys are all commented out reads as null: the defaults are meant.
    return {key: {} if value is None and key in sections(Settings) else value for key, value in loaded.items()}


def _yaml_fault(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return f"not valid YAML: {error}".replace("\n", " ")


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *path, key = dotted.split(".")
    level = tree
    for depth, section in enumerate(path, 1):
        level = level.setdefault(section, {})
        if not isinstance(level, dict):
            raise ConfigError(f"{'.'.join(path[:depth])}: got {level!r}, allowed: a mapping ({dotted} is asked for)")
    level[key] = value


def _counts_spelled_out(overrides: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """`deployment.decode` = 2 as `deployment.decode.count` = 2, which leaves the other keys of the kind alone."""
    for dotted, value in overrides.items():
        yield (f"{dotted}.count" if dotted in _NODES and is_count(value) else dotted), value


def _set_aside_other_sort(tree: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    nodes = tree.get("deployment")
    if not isinstance(nodes, dict):
        return
    nodes = {key: as_kind(value) for key, value in nodes.items() if key not in KINDS or value is not None}
    asked = {kind for kind in KINDS if overrides.get(f"deployment.{kind}.count")}
    if asked == {"colocated"}:
        nodes = {key: value for key, value in nodes.items() if key not in ("prefill", "decode")}
    elif asked and "colocated" not in asked:
        nodes.pop("colocated", None)
    tree["deployment"] = nodes
