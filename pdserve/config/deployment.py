"""How many nodes of which kind, of how many ranks each, and what a rank takes of its host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from pdserve.config.section import Section

KINDS = ("prefill", "decode", "colocated")

_GPU_RANK = {"cpus": 2, "gpus": 1}  # one core computes and launches, one moves pages
_TP8 = {"tp": 8, **_GPU_RANK}
_DP8 = {"dp": 8, "ep": True, **_GPU_RANK}

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "local": {"prefill": {"count": 1}, "decode": {"count": 1}, "colocated": {"count": 0}},
    "qwen-tp": {"prefill": {"count": 1, **_TP8}, "decode": {"count": 3, **_TP8}, "colocated": {"count": 0, **_TP8}},
    "r1-tp": {"prefill": {"count": 1, **_TP8}, "decode": {"count": 3, **_TP8}, "colocated": {"count": 0, **_TP8}},
    # A TP8 prefill node gives about 3 requests a second, a DP8 decode node takes 1 a second and rank
    # (policies/capacity.py).
    "r1-dp": {
        "prefill": {"count": 3, "ep": True, **_TP8},
        "decode": {"count": 1, **_DP8},
        "colocated": {"count": 0, **_DP8},
    },
}
"""Each by itself a whole deployment; what the settings say of a key overrides it."""


def is_count(given: Any) -> bool:
    return type(given) is int and given >= 0


def as_kind(given: Any) -> Any:
    """A bare number of nodes, or settings of nodes, as the mapping that it stands for; anything else as it is."""
    if isinstance(given, NodeSettings):
        return given.model_dump()
    return {"count": given} if is_count(given) else given


class NodeSettings(Section):
    """Nodes that are all alike. Instead of the keys, a number may stand for the count."""

    count: int = Field(default=1, ge=0)
    """Nodes of this kind."""
    tp: int = Field(default=1, ge=1, le=1024)
    """Ranks that share every request of one engine replica."""
    dp: int = Field(default=1, ge=1, le=1024)
    """Engine replicas of one node, each with requests of its own; the node has tp x dp ranks."""
    ep: bool = False
    """Whether all of a node's ranks share out whole experts, of a model that has them."""
    cpus: float = Field(default=1, ge=0)
    """CPUs that the cluster sets aside for one rank."""
    gpus: float = Field(default=0, ge=0)
    gpu_type: str | None = None
    """As Ray names it ("H200"); by default any."""
    nics: int = Field(default=0, ge=0)
    """NICs that the cluster sets aside for one rank, counted by the custom resource `nic:<nic_type>`."""
    nic_type: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _number_or_keys(cls, given: Any) -> Any:
        kind = as_kind(given)
        if not isinstance(kind, dict):
            keys = ", ".join(cls.model_fields)
            raise ValueError(f"got {given!r}, allowed: a number of nodes, at least 0, or a mapping with keys {keys}")
        return kind

    @model_validator(mode="after")
    def _resources_can_be_asked_for(self) -> Self:
        if not self.cpus and not self.gpus:
            raise ValueError("cpus and gpus are both 0; a rank must take some of one, which holds its place on a host")
        if self.gpus > 1 and self.gpus % 1:
            raise ValueError(f"gpus ({self.gpus:g}) above 1 must be a whole number")
        if self.gpu_type is not None and not self.gpus:
            raise ValueError(f"gpu_type ({self.gpu_type}) says which GPUs, gpus that there are none; set gpus to 1")
        if self.nics and self.nic_type is None:
            raise ValueError(
                f"nics ({self.nics}) needs a nic_type: X stands for the custom resource nic:X, which counts NICs"
            )
        return self

    @property
    def ranks(self) -> int:
        """Of one node."""
        return self.tp * self.dp


class DeploymentSettings(Section):
    preset: Literal["local", "qwen-tp", "r1-tp", "r1-dp"] | None = None
    """A deployment that the other keys start from; by default local."""
    prefill: NodeSettings = NodeSettings()
    """Nodes that compute prompts; 0 if there are colocated nodes."""
    decode: NodeSettings = NodeSettings()
    """Nodes that generate; 0 if there are colocated nodes."""
    colocated: NodeSettings = NodeSettings(count=0)
    """Nodes that do both: the baseline. Excludes prefill and decode nodes."""
    pin_cores: bool = False
    """Pins each rank to a core of its own, in order, as far as the cores go."""

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        asked = {kind: as_kind(given[kind]) for kind in KINDS if given.get(kind) is not None}
        colocated = asked.get("colocated")
        if isinstance(colocated, dict) and colocated.get("count", 1) != 0 and not {"prefill", "decode"} & asked.keys():
            asked |= {"prefill": {"count": 0}, "decode": {"count": 0}}  # the baseline alone means no others
        name = given.get("preset")
        base = PRESETS.get(name if isinstance(name, str) else "local", PRESETS["local"])
        return {**given, **{kind: _over(base[kind], asked.get(kind, {})) for kind in KINDS}}

    @model_validator(mode="after")
    def _one_sort(self) -> Self:
        prefill, decode, colocated = self.prefill.count, self.decode.count, self.colocated.count
        if colocated and (prefill or decode):
            raise ValueError(
                f"colocated ({colocated}) excludes prefill ({prefill}) and decode ({decode}): "
                "set colocated to 0, or the other two"
            )
        if not colocated and not (prefill and decode):
            raise ValueError(
                f"prefill ({prefill}) and decode ({decode}) must both be at least 1, or colocated at least 1"
            )
        return self


def _over(base: Mapping[str, Any], asked: Any) -> Any:
    """Keys that were asked for over a preset's; who names nodes at all without a count means one, or the preset's."""
    if not isinstance(asked, dict):
        return asked
    named = {"count": base["count"] or 1} if asked else {}
    return {**base, **named, **asked}
