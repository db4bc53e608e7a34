"""What the demo asks: short, about 1,000 tokens, about 4,000 tokens, Unicode, code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from pdserve.text import Tokenizer

ANSWER_TOKENS = 64
_PLACES = ("the harbour", "the north ridge", "the old mill", "the river bend", "the lighthouse", "the salt flats")
_SIGHTS = (
    "two grey herons",
    "a seal asleep on a rock",
    "fresh snow on the path",
    "an empty boat",
    "low cloud",
    "a fox",
)
_MOODS = ("The wind came from the west.", "It rained until noon.", "The sea was calm.", "Nobody else was about.")


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    name: str
    tokens: tuple[int, ...]
    max_tokens: int = ANSWER_TOKENS


def demo_prompts(tokenizer: Tokenizer, max_model_len: int) -> list[DemoPrompt]:
    """Prompts with the chat template applied; the long ones are cut to what the context allows."""
    room = max_model_len - ANSWER_TOKENS
    question = "\nIn one sentence: what kind of text is this?"
    texts = {
        "short": "What is the capital of France? Answer in one sentence.",
        "unicode": "Translate to English: 人工智能改变世界。 🌍🚀 Ça coûte 12 €, n'est-ce pas? 👩‍🔬",
        "code": "What does this do?\n\ndef f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)\n",
        "1k": _log_of(tokenizer, min(1_000, room - 100)) + question,
        "4k": _log_of(tokenizer, min(4_000, room - 100)) + question,
    }
    prompts = []
    for name, text in texts.items():
        messages = [{"role": "user", "content": text}]
        prompts.append(DemoPrompt(name, tuple(tokenizer.apply_chat_template(messages))))
    return prompts


def _log_of(tokenizer: Tokenizer, tokens: int) -> str:
    """A walker's log of about so many tokens."""
    lines: list[str] = []
    length = 0
    for line in _log_lines():
        length += len(tokenizer.encode(line, add_special=False))
        if length > tokens:
            return "".join(lines)
        lines.append(line)
    raise AssertionError("the log has no end")


def _log_lines() -> Iterator[str]:
    for day in count(1):
        place, sight = _PLACES[day % len(_PLACES)], _SIGHTS[(day * 5) % len(_SIGHTS)]
        yield f"Day {day}: walked to {place} and saw {sight}. {_MOODS[(day * 3) % len(_MOODS)]}\n"
