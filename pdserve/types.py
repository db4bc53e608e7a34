"""The data that rooms hand to each other: ids, requests, sampling parameters, step outputs.

Everything here is frozen and free of behaviour, so that it can be pickled between processes and compared in tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

RequestId = NewType("RequestId", str)
NodeId = NewType("NodeId", str)
PageIndex = NewType("PageIndex", int)
Incarnation = NewType("Incarnation", int)
"""64 random bits that a node draws at start; a restarted node is another incarnation."""


class Role(StrEnum):
    """What a node's engine does."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # cancelled by the caller
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 switch those filters off. With `seed` the draw depends on the
    seed and the position alone, never on the batch.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to complete. `prompt` holds token ids; at least one."""

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one engine step adds to one request: usually one token, and at the end a reason."""

    request_id: RequestId
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    error: str | None = None
    unavailable: bool = False  # the error lies in the cluster's present state: the same request may work later
