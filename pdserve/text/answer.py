"""One answer's text, from the engine's outputs: detokenized, cut at stop strings, counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.text.detokenizer import Detokenizer
from pdserve.text.stop import StopStrings
from pdserve.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class TextDelta:
    """`tokens` ids came in, `text` went out (perhaps none: a character or a stop string may be incomplete)."""

    text: str
    tokens: tuple[int, ...]
    finish: FinishReason | None = None


class AnswerText:
    """Follows one sequence. A stop string ends it early: the caller sees `finish` and cancels the generation.

    Text of tokens before the `min_tokens`-th is not searched for stop strings. The token that ended the sequence (end
    of sequence, stop token) has no text; it is counted, as the engine made it.
    """

    def __init__(self, detokenizer: Detokenizer, sampling: SamplingParams, eos_token_id: int | None = None) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(sampling.stop)
        self._watching = bool(sampling.stop)
        self._min_tokens = sampling.min_tokens
        self._ending = frozenset(sampling.stop_token_ids) | ({eos_token_id} if eos_token_id is not None else set())
        self.tokens = 0
        """Tokens generated so far, the one that completed a stop string being the last."""

    def push(self, tokens: Sequence[int], finish: FinishReason | None) -> TextDelta:
        """What one engine output adds; `finish` is the engine's, or STOP where a stop string came first."""
        before = self.tokens
        hidden = finish is FinishReason.STOP and bool(tokens) and tokens[-1] in self._ending
        text = self._show(tokens[:-1] if hidden else tokens)
        if self._stopped():
            return TextDelta(text, tuple(tokens[: self.tokens - before]), FinishReason.STOP)
        self.tokens += hidden
        if finish is None:
            return TextDelta(text, tuple(tokens))
        text += self._stops.push(self._detokenizer.finish())
        if self._stopped():
            finish = FinishReason.STOP
        return TextDelta(text + self._stops.finish(), tuple(tokens), finish)

    def _stopped(self) -> bool:
        return self._stops.matched is not None

    def _show(self, tokens: Sequence[int]) -> str:
        if not self._watching:
            self.tokens += len(tokens)
            return self._detokenizer.push(tokens)
        parts: list[str] = []
        for token in tokens:  # one by one, so that the one that completes a stop string is known
            self.tokens += 1
            text = self._detokenizer.push((token,))
            parts.append(text if self.tokens < self._min_tokens else self._stops.push(text))
            if self._stopped():
                break
        return "".join(parts)
