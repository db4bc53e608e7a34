"""What the next step computes. Pure: progress and a number of free pages in, a plan out; nothing is changed here.

The nodes and the simulator call the same functions; a caller carries its own data in subclasses of `Progress`.
Rules: first come, first served; a running sequence always decodes; prompts are computed in chunks within one budget a
step; when pages run out, the newest sequence gives its pages up, so that the oldest always gets on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pdserve.config import EngineSettings


@dataclass(slots=True, eq=False)
class Progress:
    """How far one sequence or prefill job is; changed by its owner only."""

    target_tokens: int
    """Tokens that chunks compute: a job's tokens, or a sequence's known tokens without the last."""
    computed_tokens: int
    """Tokens whose keys and values are in the cache. At `target_tokens`, a sequence decodes."""
    held_pages: int


P = TypeVar("P", bound=Progress)
P_co = TypeVar("P_co", bound=Progress, covariant=True)


@dataclass(frozen=True, slots=True)
class Limits:
    page_size: int  # tokens
    chunk_tokens: int  # prompt tokens of all chunks of one step; a multiple of page_size
    max_batch: int  # sequences that run at once

    @staticmethod
    def of(settings: EngineSettings) -> Limits:
        return Limits(settings.page_size, settings.chunk_tokens, settings.max_batch)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class Span(Generic[P_co]):
    """Tokens `start:end` of one prompt, to compute in this step; both on page borders, but for the prompt's end."""

    progress: P_co
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StepPlan(Generic[P]):
    """Carried out in the fields' order: give pages up, admit, add pages, then run `decode` and `chunks` together."""

    preempt: tuple[P, ...]  # newest first
    admit: tuple[P, ...]  # from the front of the waiting queue
    grow: tuple[tuple[P, int], ...]  # pages to add
    decode: tuple[P, ...]  # each computes its last known token
    chunks: tuple[Span[P], ...]

    @property
    def pages_from_pool(self) -> int:
        """Pages that the preempted ones do not cover."""
        return max(0, sum(pages for _, pages in self.grow) - sum(victim.held_pages for victim in self.preempt))


def plan_chunks(queue: Sequence[P], limits: Limits) -> tuple[Span[P], ...]:
    """Chunks of one step, within its budget; the first in the queue always has one, and it comes first.

    What the first does not need, and half of the budget while it needs more than one step, goes to the others, those
    with the least left to compute before the rest. So a long prompt does not delay every short one, and is itself
    delayed at most twofold.
    """
    if not queue:
        return ()
    budget, page_size = limits.chunk_tokens, limits.page_size
    room = budget - _remaining(queue[0])
    if room < 0:
        room = min(budget // 2, budget - page_size)
    riders: list[Span[P]] = []
    for progress in sorted(queue[1:], key=_remaining):
        span = _next_span(progress, room, page_size)
        if span is None:
            break
        riders.append(span)
        room -= span.end - span.start
    taken = sum(span.end - span.start for span in riders)
    head = _next_span(queue[0], budget - taken, page_size)
    assert head is not None
    return (head, *riders)


def _remaining(progress: Progress) -> int:
    return progress.target_tokens - progress.computed_tokens


def plan_step(running: Sequence[P], waiting: Sequence[P], free_pages: int, limits: Limits) -> StepPlan[P]:
    """One step of decoding sequences and, on a colocated node, of prompts that are computed beside them.

    `running` and `waiting` are in order of arrival. A waiting sequence that holds pages came from a prefill node.
    """
    kept, grow, preempt, free = _keep(running, waiting, free_pages, limits)
    decode = [progress for progress in kept if progress.computed_tokens >= progress.target_tokens]
    chunks: tuple[Span[P], ...] = ()
    budget = limits.chunk_tokens
    if len(decode) < len(kept):
        prefilling = (progress for progress in kept if progress.computed_tokens < progress.target_tokens)
        chunks, budget = _pack(prefilling, budget, limits.page_size)
    admit: list[P] = []
    if waiting and not preempt:
        if not kept:
            preempt, free = _make_room_for_head(waiting, free, limits)
        later = [progress for progress in waiting if progress not in preempt] if preempt else waiting
        admit, pages, more_chunks = _admit(later, free, budget, limits, running=len(kept))
        decode += [progress for progress in admit if progress.computed_tokens >= progress.target_tokens]
        grow += zip(admit, pages, strict=True)
        chunks += tuple(more_chunks)
    return StepPlan(tuple(preempt), tuple(admit), tuple(grow), tuple(decode), chunks)


def _admit(
    waiting: Sequence[P], free: int, budget: int, limits: Limits, *, running: int
) -> tuple[list[P], list[int], list[Span[P]]]:
    """The front of the waiting queue, as far as places, pages and budget go: admitted, pages for each, their chunks."""
    admit: list[P] = []
    pages: list[int] = []
    chunks: list[Span[P]] = []
    for progress in waiting:
        need = _missing_pages(progress, limits)
        # What runs may soon want a page each; a sequence that has come with its pages is let in regardless.
        spare = 0 if progress.held_pages else running + len(admit)
        if running + len(admit) >= limits.max_batch or need + spare > free:
            break
        if progress.computed_tokens < progress.target_tokens:
            span = _next_span(progress, budget, limits.page_size)
            if span is None:
                break
            chunks.append(span)
            budget = 0 if span.end < progress.target_tokens else budget - (span.end - span.start)
        admit.append(progress)
        pages.append(need)
        free -= need
    return admit, pages, chunks


def _keep(
    running: Sequence[P], waiting: Sequence[P], free: int, limits: Limits
) -> tuple[list[P], list[tuple[P, int]], list[P], int]:
    """Lets every running sequence grow, oldest first, at the cost of the newest: kept, growth, victims, free pages."""
    grow: list[tuple[P, int]] = []
    victims: list[P] = []
    holders = list(running)  # oldest first; the newest are popped
    page_size = limits.page_size
    asked_waiting = False
    index = 0
    while index < len(holders) and index < len(running):
        progress = running[index]
        if (
            progress.computed_tokens < progress.target_tokens
            or progress.computed_tokens < progress.held_pages * page_size
        ):
            index += 1
            continue
        need = _missing_pages(progress, limits)
        if need > free and not asked_waiting:
            asked_waiting = True
            holders.extend(other for other in waiting if other.held_pages)
        while need > free and len(holders) > index:
            victims.append(holders.pop())
            free += victims[-1].held_pages
        if len(holders) > index:
            grow.append((progress, need))
            free -= need
            index += 1
    return holders[: len(running)], grow, victims, free


def _make_room_for_head(waiting: Sequence[P], free: int, limits: Limits) -> tuple[list[P], int]:
    """Nothing runs, so nothing will end: if the head lacks a page, the newest that wait with pages give theirs up.

    A head that has come with its pages lacks one at most; a prompt still to compute has nobody with pages behind it.
    """
    need = _missing_pages(waiting[0], limits)
    victims: list[P] = []
    for other in reversed(waiting):
        if need <= free or other is waiting[0]:
            break
        if other.held_pages:
            victims.append(other)
            free += other.held_pages
    return victims, free


def _missing_pages(progress: Progress, limits: Limits) -> int:
    """Pages to add before the sequence's next decode step."""
    return max(0, limits.pages_for(progress.target_tokens + 1) - progress.held_pages)


def _pack(queue: Iterable[P], budget: int, page_size: int) -> tuple[tuple[Span[P], ...], int]:
    """Spans and what is left of the budget: 0 as soon as one in the queue did not get all it could use."""
    spans: list[Span[P]] = []
    for progress in queue:
        span = _next_span(progress, budget, page_size)
        if span is None:
            return tuple(spans), 0
        spans.append(span)
        budget -= span.end - span.start
        if span.end < progress.target_tokens:
            return tuple(spans), 0
    return tuple(spans), budget


def _next_span(progress: P, budget: int, page_size: int) -> Span[P] | None:
    start = progress.computed_tokens
    end = min(progress.target_tokens, start + budget)
    if end < progress.target_tokens:
        end -= end % page_size
    return Span(progress, start, end) if end > start else None
