"""What pydantic found wrong, in the words of the settings: the key, the value given, what is allowed."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo


def describe(error: ValidationError, root: type[BaseModel], overridden: frozenset[str] = frozenset()) -> str:
    """Every fault in one line: key, value given, what is allowed.

    `root` is a tree of sections. Keys in `overridden` are marked as coming from the command line.
    """
    return "; ".join(_describe_one(detail, root, overridden) for detail in error.errors())


def key_names(section: type[BaseModel]) -> str:
    return ", ".join(section.model_fields)


def sections(root: type[BaseModel]) -> dict[str, type[BaseModel]]:
    return {
        name: field.annotation
        for name, field in root.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def _describe_one(detail: Any, root: type[BaseModel], overridden: frozenset[str]) -> str:
    # pydantic appends the branch of a union to the path; the settings' own names end before it.
    loc = tuple(part for part in detail["loc"] if isinstance(part, str))
    key = ".".join(loc)
    label = f"{key} (from the command line)" if key in overridden else key
    if detail["type"] == "extra_forbidden":
        return f"unknown key {label}; {_suggestion(loc, root)}allowed here: {key_names(_section_at(loc[:-1], root))}"
    if detail["type"] == "value_error":
        return f"{label}: {detail['ctx']['error']}"
    return f"{label}: got {detail['input']!r}, allowed: {_allowed_at(loc, root)}"


def _section_at(path: tuple[str, ...], root: type[BaseModel]) -> type[BaseModel]:
    return _section_at(path[1:], sections(root)[path[0]]) if path else root


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a tree, dotted; those nearer to the root first."""
    below = sections(section)
    yield from (f"{prefix}{name}" for name in section.model_fields)
    for name, model in below.items():
        yield from _keys(model, f"{prefix}{name}.")


def _suggestion(loc: tuple[str, ...], root: type[BaseModel]) -> str:
    """`did you mean …? ` for a right key that stands in the wrong place, or for a misspelt one."""
    name = loc[-1]
    meant = [key for key in _keys(root) if key.split(".")[-1] == name]
    if not meant:
        near = difflib.get_close_matches(name, _section_at(loc[:-1], root).model_fields, n=1)
        meant = [".".join((*loc[:-1], key)) for key in near]
    return f"did you mean {meant[0]}? " if meant else ""


def _allowed_at(loc: tuple[str, ...], root: type[BaseModel]) -> str:
    if not loc:
        return f"a mapping of sections ({key_names(root)})"
    around = _section_at(loc[:-1], root)
    if loc[-1] in sections(around):
        return f"a mapping with keys {key_names(sections(around)[loc[-1]])}"
    return _allowed(around.model_fields[loc[-1]])


def _allowed(field: FieldInfo) -> str:
    """What a field takes, in words: `a whole number, at least 1`, `bf16, fp32`."""
    bounds = ""
    for limit in field.metadata:
        for name, words in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than")):
            if hasattr(limit, name):
                bounds += f", {words} {getattr(limit, name)}"
    return _kind_in_words(field.annotation) + bounds


def _kind_in_words(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(str(value) for value in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_kind_in_words(part) for part in get_args(annotation))
    if get_origin(annotation) is list:
        return f"a list, each {_kind_in_words(get_args(annotation)[0])}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return words[annotation]
