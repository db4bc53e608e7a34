"""From a request's body to the tokens and the sampling parameters that a backend is given."""

from __future__ import annotations

import asyncio
from typing import Any

from pdserve.errors import ContextLengthError, RequestError
from pdserve.openai.errors import bad_request
from pdserve.openai.requests import (
    MAX_PROMPTS,
    MAX_STOP_STRINGS,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ContentPart,
    SamplingBody,
)
from pdserve.text import Tokenizer
from pdserve.types import SamplingParams

COMPLETION_DEFAULT_TOKENS = 16
"""OpenAI's default of /v1/completions; a chat answer may fill the context."""
_GREEDY_BELOW = 1e-5
_LONG_TEXT = 2_000  # characters; encoding more takes over a millisecond, and every stream waits for the event loop


async def encode(tokenizer: Tokenizer, text: str, add_special: bool = True) -> list[int]:
    if len(text) > _LONG_TEXT:
        return await asyncio.to_thread(tokenizer.encode, text, add_special)
    return tokenizer.encode(text, add_special)


async def chat_prompt(tokenizer: Tokenizer, messages: list[ChatMessage]) -> list[int]:
    """Raises RequestError."""
    return await encode(tokenizer, tokenizer.render_chat(template_messages(messages)), add_special=False)


async def completion_prompts(tokenizer: Tokenizer, prompt: CompletionRequest) -> list[list[int]]:
    """One list of token ids per choice. Raises RequestError."""
    prompts = _several(prompt.prompt)
    if len(prompts) > MAX_PROMPTS:
        raise bad_request(f"prompt has {len(prompts)} prompts; at most {MAX_PROMPTS} go in one request", "prompt")
    encoded = []
    for one in prompts:
        if not one:
            raise bad_request("prompt is empty: give at least one character or token", "prompt")
        tokens = await encode(tokenizer, one) if isinstance(one, str) else one
        if not tokens:
            raise bad_request("prompt has no tokens", "prompt")
        check_tokens(tokenizer, tokens, "prompt")
        encoded.append(tokens)
    return encoded


def _several(prompt: Any) -> list[str] | list[list[int]]:
    """The four forms of `prompt` as one."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt is an empty list: give at least one prompt", "prompt")
    return [prompt] if isinstance(prompt[0], int) else prompt


def check_tokens(tokenizer: Tokenizer, tokens: list[int], param: str) -> None:
    highest = max(tokens, default=0)
    if highest >= tokenizer.vocab_size:
        raise bad_request(f"{param} has the token id {highest}; ids go from 0 to {tokenizer.vocab_size - 1}", param)


def template_messages(messages: list[ChatMessage]) -> list[dict[str, str]]:
    """What the chat template sees: roles it knows, content as one string. Raises ApiError (400)."""
    return [_template_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def _template_message(message: ChatMessage, path: str) -> dict[str, str]:
    for name, value in (message.model_extra or {}).items():
        if value:  # clients send back answers with `tool_calls: null` and the like
            raise bad_request(f"{path}.{name} is not supported", f"{path}.{name}", "unsupported_parameter")
    if message.content is None:
        raise bad_request(f"{path}.content is required", f"{path}.content", "missing_required_parameter")
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(_part_text(part, f"{path}.content.{index}") for index, part in enumerate(content))
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": content, **named}


def _part_text(part: ContentPart, path: str) -> str:
    if part.type != "text":
        message = f"{path}.type is {part.type!r}; this model reads parts of type 'text' only"
        raise bad_request(message, f"{path}.type", "unsupported_value")
    if part.text is None:
        raise bad_request(f"{path}.text is required", f"{path}.text", "missing_required_parameter")
    return part.text


def chat_max_tokens(body: ChatCompletionRequest) -> int | None:
    """The limit that was asked for, under either name. Raises ApiError (400)."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_request(
            f"max_tokens ({old}) and max_completion_tokens ({new}) disagree; give one", "max_completion_tokens"
        )
    name = "max_tokens" if new is None else "max_completion_tokens"
    limit = old if new is None else new
    if limit == 0:
        raise bad_request(f"{name} must be at least 1: a chat answer has at least one token", name, "invalid_value")
    return limit


def answer_limit(prompt_tokens: int, asked: int | None, max_model_len: int, default: int | None = None) -> int:
    """How many tokens the answer may have: what was `asked`, else `default` or whatever the context leaves.

    Raises ContextLengthError with the numbers.
    """
    room = max_model_len - prompt_tokens
    if asked is None and room >= 1:
        return room if default is None else min(default, room)
    wanted = 1 if asked is None else asked
    if wanted <= room:
        return wanted
    raise ContextLengthError(
        f"this model's maximum context length is {max_model_len} tokens; you requested {prompt_tokens + wanted} tokens"
        f" ({prompt_tokens} in the prompt, {'at least ' if asked is None else ''}{wanted} for the answer)."
        " Shorten the prompt or ask for fewer tokens",
        "messages" if default is None else "prompt",
    )


def sampling_params(body: SamplingBody, max_tokens: int) -> SamplingParams:
    """Raises RequestError."""
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(f"min_tokens ({min_tokens}) is more than max_tokens ({max_tokens})", "min_tokens")
    temperature = 1.0 if body.temperature is None else body.temperature
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=body.seed,
        stop=_stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
    )


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(stops)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop")
    if "" in stops:
        raise RequestError("stop has an empty string, which would match everywhere", "stop")
    return tuple(stops)
