"""Bodies of requests, and how they are read: JSON errors and wrong types become 400s that name the parameter."""

from __future__ import annotations

from itertools import takewhile
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdserve.openai.errors import ApiError, bad_request
from pdserve.openai.parameters import check_extra_parameters

MAX_STOP_STRINGS = 16
MAX_PROMPTS = 256
_INT64 = 2**63
Tokens = list[Annotated[int, Field(ge=0)]]


class Body(BaseModel):
    """Parameters that the model does not name are kept apart, and judged by `check_extra_parameters`."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; pads nothing."""


class SamplingBody(Body):
    """What /v1/chat/completions and /v1/completions share. Null means the default."""

    max_tokens: int | None = Field(default=None, ge=0)
    min_tokens: int | None = Field(default=None, ge=0)
    stop: str | list[str] | None = None
    stop_token_ids: Tokens | None = None
    ignore_eos: bool | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    """-1 and 0 switch it off."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-_INT64, lt=_INT64)
    return_token_ids: bool | None = None
    """Choices then carry `token_ids`, the ids that their text came from."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart] | None = None
    name: str | None = None


class ChatCompletionRequest(SamplingBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=0)


class CompletionRequest(SamplingBody):
    prompt: str | list[str] | Tokens | list[Tokens]


class TokenizeRequest(Body):
    """Either a prompt, or messages to which the chat template is applied."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    tokens: Tokens


BodyT = TypeVar("BodyT", bound=Body)

_EXPECTED = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of lists of token ids",
    "stop": "a string or a list of strings",
    "content": "a string or a list of content parts",
}


def parse_body(kind: type[BodyT], body: bytes) -> BodyT:
    """Raises ApiError (400)."""
    try:
        tree = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(tree, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    try:
        request = kind.model_validate(tree)
    except ValidationError as error:
        raise _first_fault(error) from error
    check_extra_parameters(request.model_extra or {}, kind.model_fields)
    return request


def _first_fault(error: ValidationError) -> ApiError:
    detail: Any = error.errors()[0]
    path = tuple(takewhile(lambda part: not _is_union_branch(part), detail["loc"]))
    param = ".".join(str(part) for part in path)
    if detail["type"] == "missing" and path == detail["loc"]:
        return bad_request(f"{param} is required", param, "missing_required_parameter")
    if path != detail["loc"]:
        return bad_request(f"{param} must be {_EXPECTED[str(path[-1])]}", param, "invalid_type")
    if detail["type"] == "extra_forbidden":
        return bad_request(f"unknown parameter {param!r}", param, "unknown_parameter")
    return bad_request(f"{param}: {detail['msg']}, got {_short(detail['input'])}", param, "invalid_value")


def _is_union_branch(part: str | int) -> bool:
    """pydantic puts the branch that it tried into the path: `str`, `list[constrained-int]`, …"""
    return isinstance(part, str) and (part == "str" or "[" in part)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
