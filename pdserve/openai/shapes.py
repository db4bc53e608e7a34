"""The two shapes in which generated text is answered: chat and plain completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from pdserve.openai.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    Completion,
    CompletionChoice,
    Finish,
    Usage,
)


@dataclass(frozen=True, slots=True)
class ChoiceText:
    """Text of one choice: all of it, or what a chunk of a stream adds."""

    index: int
    text: str
    finish: Finish | None
    tokens: tuple[int, ...] = ()
    first: bool = False


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every body of one answer begins with."""

    id: str
    created: int
    model: str
    include_usage: bool
    token_ids: bool = False
    """Whether choices carry the ids of their tokens."""

    def choice(self, choice: ChoiceText) -> dict[str, Any]:
        """What every choice says in the same way."""
        fields = {"index": choice.index, "logprobs": None, "finish_reason": choice.finish}
        return {**fields, "token_ids": list(choice.tokens)} if self.token_ids else fields

    def whole(self) -> dict[str, Any]:
        return {"id": self.id, "created": self.created, "model": self.model}

    def chunk(self) -> dict[str, Any]:
        """Where usage was asked for, every chunk but the last says null."""
        return {**self.whole(), "usage": None} if self.include_usage else self.whole()


class AnswerShape(Protocol):
    @property
    def head(self) -> AnswerHead: ...

    def whole(self, choices: Sequence[ChoiceText], usage: Usage) -> BaseModel: ...

    def chunk(self, choice: ChoiceText) -> BaseModel: ...

    def usage_chunk(self, usage: Usage) -> BaseModel: ...


@dataclass(frozen=True, slots=True)
class ChatShape:
    head: AnswerHead

    def whole(self, choices: Sequence[ChoiceText], usage: Usage) -> ChatCompletion:
        (choice,) = choices
        assert choice.finish is not None
        message = AssistantMessage(role="assistant", content=choice.text, refusal=None)
        answer = ChatChoice(message=message, **self.head.choice(choice))
        return ChatCompletion(object="chat.completion", choices=[answer], usage=usage, **self.head.whole())

    def chunk(self, choice: ChoiceText) -> ChatCompletionChunk:
        if choice.first:
            delta = ChatDelta(role="assistant", content=choice.text)
        else:
            delta = ChatDelta(content=choice.text) if choice.text else ChatDelta()
        part = ChatChunkChoice(delta=delta, **self.head.choice(choice))
        return ChatCompletionChunk(object="chat.completion.chunk", choices=[part], **self.head.chunk())

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        return ChatCompletionChunk(object="chat.completion.chunk", choices=[], usage=usage, **self.head.whole())


@dataclass(frozen=True, slots=True)
class CompletionShape:
    head: AnswerHead

    def _choice(self, choice: ChoiceText) -> CompletionChoice:
        return CompletionChoice(text=choice.text, **self.head.choice(choice))

    def whole(self, choices: Sequence[ChoiceText], usage: Usage) -> Completion:
        parts = [self._choice(choice) for choice in choices]
        return Completion(object="text_completion", choices=parts, usage=usage, **self.head.whole())

    def chunk(self, choice: ChoiceText) -> Completion:
        return Completion(object="text_completion", choices=[self._choice(choice)], **self.head.chunk())

    def usage_chunk(self, usage: Usage) -> Completion:
        return Completion(object="text_completion", choices=[], usage=usage, **self.head.whole())
