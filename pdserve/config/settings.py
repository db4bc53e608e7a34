"""The tree's sections, apart from the deployment's."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from pdserve.config.deployment import DeploymentSettings
from pdserve.config.section import Section

EMBEDDED_MODEL = "smollm2-135m-instruct"


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
    """auto: RDMA where both sides have it, else shm between processes of one host, else tcp.

    ucx is taken where it is named, and by auto only between nodes that both have no libfabric.
    """
    allow_tcp: bool = False
    """Whether nodes with GPUs may fall back on tcp; without it they say what is missing and stop."""
    nics: list[str] | None = None
    """Interfaces to use, by device, address or network (10.0.0.0/24); by default the best, or every active RDMA device.

    All nodes have the same setting: on several hosts, an address can only be right on one of them.
    """
    libfabric: str | None = None
    """Path of the library; by default the system's, then the one that the `mpich` wheel brings."""
    libucp: str | None = None
    """The same for UCX."""
    spin: bool | None = None
    """Whether an idle transport polls without a rest; by default as the provider's profile says."""
    window: int = Field(default=128, ge=1)
    """Writes that one prefill node may have outstanding towards one decode node.

    At most as many as the decode node's receive queue for that prefill node holds.
    """

    @field_validator("nics")
    @classmethod
    def _each_nic_once(cls, given: list[str] | None) -> list[str] | None:
        if given is not None and (not given or len(set(given)) < len(given)):
            raise ValueError(f"got {given!r}, allowed: null, or a list that names at least one NIC and none twice")
        return given


class HandoffSettings(Section):
    request_timeout_s: float = Field(default=10.0, gt=0)
    """How long a decode node waits for a prefill node's answer to a request."""
    transfer_timeout_s: float = Field(default=600.0, gt=0)
    """How long a decode node waits for the pages of an accepted request (queueing and compute included)."""
    failover_timeout_s: float = Field(default=60.0, gt=0)
    """How long a request whose prefill node was lost waits for another one."""
    attempts: int = Field(default=3, ge=1)
    """Prefill nodes tried, one after another, before a request fails."""
    sources: Literal["random", "rail"] = "random"
    """Which of several copies of a cache is read: any, at random, or one whose NICs are on the decode rank's rails."""


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
