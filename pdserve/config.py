"""The one settings tree, read from `clusters/*.yaml`; command-line flags override it.

An unknown key, a wrong type or an impossible combination raises `ConfigError`, which names the key, the value and what
is allowed, before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pdserve.errors import ConfigError

EMBEDDED_MODEL = "smollm2-135m-instruct"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(Section):
    path: str = EMBEDDED_MODEL
    """A local Hugging Face directory, or the name of the embedded model."""
    name: str | None = None
    """What the API calls it; by default the directory's name."""


class EngineSettings(Section):
    dtype: Literal["bf16", "fp32"] = "bf16"
    deterministic: bool = True
    """Same kernels and summation order whatever the batch, chunk or role."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Context limit in tokens; by default the model's."""
    page_size: Literal[8, 16, 32, 64, 128] = 32
    """Tokens a page."""
    chunk_tokens: int = Field(default=512, ge=8)
    """Prompt tokens that one prefill step computes; a multiple of page_size."""
    max_batch: int = Field(default=32, ge=1)
    """Sequences that decode together."""
    kv_cache_tokens: int = Field(default=32_768, ge=16)
    """Capacity of the page pool of one node."""
    threads: Literal[1] = 1
    """Cores that one rank computes on."""

    @model_validator(mode="after")
    def _chunk_is_whole_pages(self) -> Self:
        if self.chunk_tokens % self.page_size:
            raise ValueError(
                f"chunk_tokens ({self.chunk_tokens}) must be a multiple of page_size ({self.page_size})"
            )
        return self

    @property
    def pages(self) -> int:
        return -(-self.kv_cache_tokens // self.page_size)


class TransportSettings(Section):
    provider: Literal["auto", "shm", "tcp", "tcp;ofi_rxm", "sockets"] = "auto"
    """auto: shm between processes of one host, else tcp."""
    libfabric: str | None = None
    """Path of the library; by default the system's, then the one that the `mpich` wheel brings."""
    window: int = Field(default=128, ge=1)
    """Writes that one prefill node may have outstanding towards one decode node."""


class DeploymentSettings(Section):
    prefill: int = Field(default=1, ge=0)
    decode: int = Field(default=1, ge=0)
    colocated: int = Field(default=0, ge=0)
    """Nodes that do both: the baseline. Excludes prefill and decode nodes."""
    pin_cores: bool = False
    """Pins each node to a core of its own, in order, as far as the cores go."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.colocated:
            if "prefill" in self.model_fields_set or "decode" in self.model_fields_set:
                if self.prefill or self.decode:
                    raise ValueError("colocated nodes exclude prefill and decode nodes: set those to 0")
        elif not (self.prefill and self.decode):
            raise ValueError(
                f"prefill ({self.prefill}) and decode ({self.decode}) must both be at least 1, or colocated at least 1"
            )
        return self


class HandoffSettings(Section):
    request_timeout_s: float = Field(default=10.0, gt=0)
    """How long a decode node waits for a prefill node's answer to a request."""
    transfer_timeout_s: float = Field(default=600.0, gt=0)
    """How long a decode node waits for the pages of an accepted request (queueing and compute included)."""
    attempts: int = Field(default=3, ge=1)
    """Prefill nodes tried, one after another, before a request fails."""


class HttpSettings(Section):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)


class Settings(Section):
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    transport: TransportSettings = TransportSettings()
    deployment: DeploymentSettings = DeploymentSettings()
    handoff: HandoffSettings = HandoffSettings()
    http: HttpSettings = HttpSettings()
    ray_address: str | None = None
    """An existing cluster's address; by default a local cluster is started and ended with the program."""


def load_settings(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Settings from a YAML file (or the defaults), with dotted overrides such as `{"engine.dtype": "fp32"}`.

    Raises ConfigError.
    """
    tree: dict[str, Any] = {}
    source = "settings"
    if path is not None:
        source = str(path)
        try:
            loaded = yaml.safe_load(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {error}") from error
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"{path} must hold a mapping of settings, not a {type(loaded).__name__}")
        tree = loaded or {}
    for dotted, value in (overrides or {}).items():
        *sections, key = dotted.split(".")
        level = tree
        for section in sections:
            level = level.setdefault(section, {})
        level[key] = value
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: {describe(error)}") from error


def describe(error: ValidationError) -> str:
    """One line per fault: key, what is wrong, the value given."""
    return "; ".join(_describe_one(detail) for detail in error.errors())


def _describe_one(detail: Any) -> str:
    key = ".".join(str(part) for part in detail["loc"]) or "settings"
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key!r} (allowed here: {', '.join(_allowed(detail['loc']))})"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{key}: {message}, got {detail['input']!r}" if detail["type"] != "value_error" else f"{key}: {message}"


def _allowed(loc: tuple[Any, ...]) -> list[str]:
    section: type[BaseModel] = Settings
    for part in loc[:-1]:
        annotation = section.model_fields[part].annotation
        assert isinstance(annotation, type)
        section = annotation
    return sorted(section.model_fields)
