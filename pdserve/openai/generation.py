"""Runs one HTTP request's sequences on the backend, and merges their text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from pdserve.errors import NoNodeAvailable
from pdserve.openai.backend import Backend
from pdserve.openai.errors import generation_failed
from pdserve.text import AnswerText, TextDelta, Tokenizer
from pdserve.types import FinishReason, GenerationRequest

TextDeltas = AsyncGenerator[TextDelta, None]


async def answer(backend: Backend, tokenizer: Tokenizer, request: GenerationRequest, *, continues: bool) -> TextDeltas:
    """Text as it comes; the last delta has a finish reason, and by then the backend's generator is closed.

    `max_tokens` 0 asks for nothing, and the backend is not troubled. Raises ApiError when the sequence failed, was
    aborted or just ended, NoNodeAvailable when it may work later.
    """
    if request.sampling.max_tokens == 0:
        yield TextDelta("", (), FinishReason.LENGTH)
        return
    text = AnswerText(tokenizer.detokenizer(continues=continues), request.sampling, tokenizer.eos_token_id)
    async with aclosing(backend.generate(request)) as outputs:
        async for output in outputs:
            if output.finish is FinishReason.ERROR and output.unavailable:
                raise NoNodeAvailable(output.error or "no node can go on with this request now")
            if output.finish is FinishReason.ERROR:
                raise generation_failed(output.error or "the generation failed")
            if output.finish is FinishReason.ABORT:
                raise generation_failed(output.error or "the server aborted the generation")
            delta = text.push(output.tokens, output.finish)
            if delta.finish is not None:
                break
            yield delta
        else:
            raise generation_failed("the generation ended without a finish reason")
    yield delta


async def merged(answers: Sequence[TextDeltas]) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Deltas of all answers, each with its index, as they come. The first error ends them all."""
    if len(answers) == 1:
        async with aclosing(answers[0]) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, TextDelta | Exception | None]] = asyncio.Queue(maxsize=len(answers))
    tasks = [asyncio.create_task(_drain(index, deltas, queue)) for index, deltas in enumerate(answers)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(
    index: int, answer: TextDeltas, queue: asyncio.Queue[tuple[int, TextDelta | Exception | None]]
) -> None:
    try:
        async with aclosing(answer) as deltas:
            async for delta in deltas:
                await queue.put((index, delta))
    except Exception as error:
        await queue.put((index, error))
    else:
        await queue.put((index, None))
