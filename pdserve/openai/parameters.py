"""Parameters beyond those that are served: which may be ignored, and which would change the answer."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from pdserve.openai.errors import bad_request

HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",  # says nothing without tools
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Name → values (beside null) that ask for nothing and therefore pass."""


def check_extra_parameters(extra: Mapping[str, Any], served: Collection[str]) -> None:
    """Raises ApiError (400) that names the first parameter that would change the answer or that nobody knows."""
    for name, value in extra.items():
        if value is None or name in HARMLESS:
            continue
        if name not in UNSUPPORTED:
            raise bad_request(f"unknown parameter {name!r}{_suggestion(name, served)}", name, "unknown_parameter")
        neutral = UNSUPPORTED[name]
        if not any(_same(value, allowed) for allowed in neutral):
            raise bad_request(_refusal(name, neutral), name, "unsupported_parameter")


def _same(value: Any, neutral: Any) -> bool:
    """Equal, where 0 is 0.0 but not false."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _refusal(name: str, neutral: tuple[Any, ...]) -> str:
    only = " or ".join(repr(value) for value in neutral)
    return f"{name} is not supported: leave it out" + (f", or give {only}" if only else "")


def _suggestion(name: str, served: Collection[str]) -> str:
    close = difflib.get_close_matches(name, [*served, *UNSUPPORTED, *HARMLESS], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
