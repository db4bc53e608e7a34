"""The one settings tree, read from `clusters/*.yaml`; command-line flags override it.

An unknown key, a wrong type or an impossible combination raises `ConfigError`, which names the key, the value and what
is allowed, before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pdserve.errors import ConfigError
from pdserve.validation import describe, key_names, sections

EMBEDDED_MODEL = "smollm2-135m-instruct"


class Section(BaseModel):
    # Strict: YAML has types of its own, so `port: "8000"` or `port: true` is a mistake and not a number.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSettings(Section):
    path: str = EMBEDDED_MODEL
    """A local Hugging Face directory, or the name of the embedded model."""
    name: str | None = None
    """What the API calls it; by default the directory's name."""


class EngineSettings(Section):
    dtype: Literal["bf16", "fp32"] = "bf16"
    deterministic: bool = True
    """Same kernels and summation order whatever the batch, chunk or role."""
    max_model_len: int | None = Field(default=None, ge=4)
    """Context limit in tokens; by default the model's."""
    page_size: Literal[8, 16, 32, 64, 128] = 32
    """Tokens a page."""
    kv_layout: Literal["hnd", "nhd"] = "hnd"
    """Order in a page block. nhd takes page_size times the writes where two nodes share heads differently."""
    chunk_tokens: int = Field(default=128, ge=8)
    """Prompt tokens that one prefill step computes; a multiple of page_size."""
    max_batch: int = Field(default=32, ge=1)
    """Sequences that decode together."""
    kv_cache_tokens: int = Field(default=32_768, ge=16)
    """Capacity of the page pool of one node."""
    threads: Literal[1] = 1
    """Cores that one rank computes on."""

    @model_validator(mode="after")
    def _chunks_and_sequences_fit(self) -> Self:
        if self.chunk_tokens % self.page_size:
            raise ValueError(f"chunk_tokens ({self.chunk_tokens}) must be a multiple of page_size ({self.page_size})")
        room = self.pages * self.page_size
        if room < self.chunk_tokens + self.page_size:
            raise ValueError(
                f"kv_cache_tokens ({self.kv_cache_tokens}) must hold at least one chunk and one page more: "
                f"chunk_tokens + page_size = {self.chunk_tokens + self.page_size}"
            )
        if self.max_model_len is not None and room < self.max_model_len:
            raise ValueError(
                f"kv_cache_tokens ({self.kv_cache_tokens}) must hold at least one sequence "
                f"of max_model_len ({self.max_model_len}) tokens"
            )
        return self

    @property
    def pages(self) -> int:
        """Pages of the pool: kv_cache_tokens, rounded up to whole pages."""
        return -(-self.kv_cache_tokens // self.page_size)


class TransportSettings(Section):
    provider: Literal["auto", "efa", "verbs;ofi_rxm", "tcp", "tcp;ofi_rxm", "shm", "sockets", "ucx"] = "auto"
    """auto: RDMA where both sides have it, else shm between processes of one host, else tcp."""
    allow_tcp: bool = False
    """Whether nodes with GPUs may fall back on tcp; without it they say what is missing and stop."""
    nics: list[str] | None = None
    """Interfaces to use, by address (tcp) or device name; by default the best one, or every active RDMA device."""
    libfabric: str | None = None
    """Path of the library; by default the system's, then the one that the `mpich` wheel brings."""
    libucp: str | None = None
    """The same for UCX."""
    spin: bool | None = None
    """Whether an idle transport polls without a rest; by default as the provider's profile says."""
    window: int = Field(default=128, ge=1)
    """Writes that one prefill node may have outstanding towards one decode node.

    The windows that a decode node grants stay below the depth of its receive queue in sum: later peers get less.
    """

    @field_validator("nics")
    @classmethod
    def _each_nic_once(cls, given: list[str] | None) -> list[str] | None:
        if given is not None and (not given or len(set(given)) < len(given)):
            raise ValueError(f"got {given!r}, allowed: null, or a list that names at least one NIC and none twice")
        return given


class DeploymentSettings(Section):
    prefill: int = Field(default=1, ge=0)
    """Nodes that compute prompts; 0 if there are colocated nodes."""
    decode: int = Field(default=1, ge=0)
    """Nodes that generate; 0 if there are colocated nodes."""
    colocated: int = Field(default=0, ge=0)
    """Nodes that do both: the baseline. Excludes prefill and decode nodes."""
    pin_cores: bool = False
    """Pins each node to a core of its own, in order, as far as the cores go."""

    @model_validator(mode="before")
    @classmethod
    def _colocated_alone_means_no_others(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("colocated") and not {"prefill", "decode"} & given.keys():
            return {**given, "prefill": 0, "decode": 0}
        return given

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.colocated and (self.prefill or self.decode):
            raise ValueError(
                f"colocated ({self.colocated}) excludes prefill ({self.prefill}) and decode ({self.decode}): "
                "set colocated to 0, or the other two"
            )
        if not self.colocated and not (self.prefill and self.decode):
            raise ValueError(
                f"prefill ({self.prefill}) and decode ({self.decode}) must both be at least 1, or colocated at least 1"
            )
        return self


class HandoffSettings(Section):
    request_timeout_s: float = Field(default=10.0, gt=0)
    """How long a decode node waits for a prefill node's answer to a request."""
    transfer_timeout_s: float = Field(default=600.0, gt=0)
    """How long a decode node waits for the pages of an accepted request (queueing and compute included)."""
    failover_timeout_s: float = Field(default=60.0, gt=0)
    """How long a request whose prefill node was lost waits for another one."""
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

    @model_validator(mode="after")
    def _pins_only_here(self) -> Self:
        if self.ray_address is not None and self.deployment.pin_cores:
            raise ValueError(
                "deployment.pin_cores works on a local cluster only; leave ray_address out, or pin_cores off"
            )
        return self


def load_settings(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Settings from a YAML file (or the defaults), with dotted overrides such as `{"engine.dtype": "fp32"}`.

    Overrides that name node counts of one kind set aside the file's counts of the other kind, so that
    `deployment.colocated` can be asked of any file. Raises ConfigError with one line that holds every fault.
    """
    overrides = dict(overrides or {})
    tree = _read_tree(Path(path)) if path is not None else {}
    _set_aside_other_kind(tree, overrides)
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
    for section in path:
        level = level.setdefault(section, {})
        if not isinstance(level, dict):
            raise ConfigError(f"{section}: got {level!r}, allowed: a mapping ({dotted} is asked for)")
    level[key] = value


def _set_aside_other_kind(tree: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    counts = tree.get("deployment")
    if not isinstance(counts, dict):
        return
    asked = {key for key in ("prefill", "decode", "colocated") if overrides.get(f"deployment.{key}")}
    if asked == {"colocated"}:
        aside: tuple[str, ...] = ("prefill", "decode")
    elif asked and "colocated" not in asked:
        aside = ("colocated",)
    else:
        return
    tree["deployment"] = {key: value for key, value in counts.items() if key not in aside}
