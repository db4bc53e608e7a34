"""The scheduler alone, driven by a small machine that keeps the books: what holds for every load."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.scheduler import Limits, Progress, Span, StepPlan, plan_chunks, plan_step


@dataclass(slots=True, eq=False)
class Item(Progress):
    name: int
    remaining: int  # tokens to generate
    known: int


def prompt(name: int, tokens: int, answer: int) -> Item:
    return Item(tokens - 1, 0, 0, name, answer, tokens)


def ready(name: int, tokens: int, answer: int, limits: Limits) -> Item:
    return Item(tokens - 1, tokens - 1, limits.pages_for(tokens - 1), name, answer, tokens)


@dataclass(slots=True)
class Books:
    """Carries plans out and checks each."""

    limits: Limits
    total_pages: int
    running: list[Item]
    waiting: deque[Item]
    colocated: bool

    @property
    def free(self) -> int:
        return self.total_pages - sum(item.held_pages for item in (*self.running, *self.waiting))

    def step(self) -> StepPlan[Item]:
        before = [(item, item.target_tokens, item.computed_tokens, item.held_pages) for item in self.running]
        plan = plan_step(self.running, self.waiting, self.free, self.limits)
        for item, target, computed, held in before:  # pure
            assert (item.target_tokens, item.computed_tokens, item.held_pages) == (target, computed, held)
        self.check(plan)
        self.carry_out(plan)
        assert self.free >= 0 and len(self.running) <= self.limits.max_batch
        return plan

    def check(self, plan: StepPlan[Item]) -> None:
        assert plan.pages_from_pool <= self.free
        holders = [item for item in (*self.running, *self.waiting) if item.held_pages]
        assert list(plan.preempt) == holders[: -len(plan.preempt) - 1 : -1] if plan.preempt else True  # the newest
        left = [item for item in self.waiting if item not in plan.preempt]
        assert list(plan.admit) == left[: len(plan.admit)]  # first come, first served
        decoders = [item for item in self.running if item.computed_tokens == item.target_tokens]
        for item in decoders:
            assert (item in plan.decode) != (item in plan.preempt)
        assert sum(span.end - span.start for span in plan.chunks) <= self.limits.chunk_tokens
        for span in plan.chunks:
            assert span.start == span.progress.computed_tokens < span.end <= span.progress.target_tokens
            assert span.start % self.limits.page_size == 0
            assert span.end == span.progress.target_tokens or span.end % self.limits.page_size == 0

    def carry_out(self, plan: StepPlan[Item]) -> None:
        for item in plan.preempt:
            (self.running if item in self.running else self.waiting).remove(item)
            item.computed_tokens = item.held_pages = 0
            if self.colocated:
                self.waiting.appendleft(item)
        for item in plan.admit:
            assert self.waiting.popleft() is item
            self.running.append(item)
        for item, pages in plan.grow:
            item.held_pages += pages
        for span in plan.chunks:
            assert span.end <= span.progress.held_pages * self.limits.page_size
            span.progress.computed_tokens = span.end
        for item in plan.decode:
            assert item.computed_tokens < item.held_pages * self.limits.page_size
            item.computed_tokens += 1
            item.target_tokens += 1
            item.known += 1
            item.remaining -= 1
            if not item.remaining:
                self.running.remove(item)
                item.held_pages = 0


def limits_strategy() -> st.SearchStrategy[Limits]:
    return st.builds(
        lambda page, chunk, batch: Limits(page, page * chunk, batch),
        st.sampled_from((4, 8)),
        st.integers(1, 4),
        st.integers(1, 6),
    )


@settings(max_examples=80, deadline=None)
@given(
    limits_strategy(),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=14),
    st.integers(0, 10),
)
def test_colocated_serves_everybody_in_any_load(
    limits: Limits, load: list[tuple[int, int, int]], more_pages: int
) -> None:
    """Pages are conserved, the budget is kept, and with room for the longest request alone, all end."""
    longest = max(limits.pages_for(tokens + answer) for tokens, answer, _ in load)
    books = Books(limits, longest + more_pages, [], deque(), colocated=True)
    arrivals = deque((prompt(name, tokens, answer), pause) for name, (tokens, answer, pause) in enumerate(load))
    everybody = [item for item, _ in arrivals]
    pause = 0
    for _ in range(20_000):
        while arrivals and pause <= 0:
            item, pause = arrivals.popleft()
            books.waiting.append(item)
        pause -= 1
        if not books.running and not books.waiting:
            if not arrivals:
                break
            continue
        oldest = min((*books.running, *books.waiting), key=lambda item: item.name)
        progress = (oldest.remaining, -oldest.computed_tokens)
        books.step()
        assert (oldest.remaining, -oldest.computed_tokens) < progress, "the oldest always gets on"
    assert not any(item.remaining for item in everybody)
    assert books.free == books.total_pages


@settings(max_examples=80, deadline=None)
@given(
    limits_strategy(),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(0, 6),
)
def test_decode_serves_everybody_in_any_load(limits: Limits, load: list[tuple[int, int]], more_pages: int) -> None:
    """Preempted sequences come back with fresh pages, as a handoff brings them; still all end."""
    longest = max(limits.pages_for(tokens + answer) for tokens, answer in load)
    books = Books(limits, longest + more_pages, [], deque(), colocated=False)
    outside = deque(prompt(name, tokens, answer) for name, (tokens, answer) in enumerate(load))
    everybody = list(outside)
    for _ in range(20_000):
        while outside and limits.pages_for(outside[0].known - 1) <= books.free:
            item = outside.popleft()
            item.target_tokens = item.computed_tokens = item.known - 1
            item.held_pages = limits.pages_for(item.known - 1)
            books.waiting.append(item)
        if not books.running and not books.waiting:
            break
        plan = books.step()
        outside.extendleft(plan.preempt)
        assert not plan.chunks
        assert plan.decode or plan.preempt
    assert not any(item.remaining for item in everybody)
    assert books.free == books.total_pages


@settings(max_examples=80, deadline=None)
@given(limits_strategy(), st.lists(st.integers(1, 100), max_size=10))
def test_jobs_share_a_step_and_the_first_gets_half_at_least(limits: Limits, lengths: list[int]) -> None:
    queue = [Progress(length, 0, limits.pages_for(length)) for length in lengths]
    while queue:
        spans = plan_chunks(queue, limits)
        head, riders = spans[0], spans[1:]
        assert head.progress is queue[0] and head.end > head.start
        assert len({id(span.progress) for span in spans}) == len(spans)
        assert sum(span.end - span.start for span in spans) <= limits.chunk_tokens
        if head.end < queue[0].target_tokens:
            half = limits.chunk_tokens // 2
            assert head.end - head.start >= max(limits.page_size, half - half % limits.page_size)
        left = [span.progress.target_tokens - span.start for span in riders]
        assert left == sorted(left), "the shortest first"
        for span in spans:
            assert span.start == span.progress.computed_tokens and span.start % limits.page_size == 0
            span.progress.computed_tokens = span.end
            assert span.end == span.progress.target_tokens or span.end % limits.page_size == 0
        queue = [progress for progress in queue if progress.computed_tokens < progress.target_tokens]


def test_short_prompts_ride_along_with_a_long_one() -> None:
    long, middle, short = (Progress(tokens, 0, 0) for tokens in (100, 40, 10))
    # Half of 32 tokens is for the others; the middle one's 6 would not end on a page border.
    assert plan_chunks([long, middle, short], LIMITS) == (Span(long, 0, 16), Span(short, 0, 10))
    assert plan_chunks([long, middle], LIMITS) == (Span(long, 0, 16), Span(middle, 0, 16))
    assert plan_chunks([short, middle], LIMITS) == (Span(short, 0, 10), Span(middle, 0, 16))


LIMITS = Limits(page_size=8, chunk_tokens=32, max_batch=4)


def test_chunks_ride_with_all_decode_rows() -> None:
    decoding = [ready(name, 9, 5, LIMITS) for name in (0, 1)]
    long, short = prompt(2, 50, 5), prompt(3, 10, 5)
    plan = plan_step(decoding, deque([long, short]), 100, LIMITS)
    assert plan.decode == tuple(decoding) and plan.admit == (long,)
    assert plan.chunks == (Span(long, 0, 32),)


def test_a_short_prompt_shares_the_last_chunk() -> None:
    first, second = prompt(0, 13, 5), prompt(1, 50, 5)
    plan = plan_step([], deque([first, second]), 100, LIMITS)
    assert plan.chunks == (Span(first, 0, 12), Span(second, 0, 16))  # 20 would not end on a page border


def test_nobody_overtakes_a_prompt_that_does_not_fit() -> None:
    running, big, small = ready(0, 9, 5, LIMITS), prompt(1, 80, 5), prompt(2, 4, 5)
    plan = plan_step([running], deque([big, small]), 10, LIMITS)
    assert plan.admit == () and plan.preempt == () and plan.decode == (running,)


def test_the_newest_gives_way() -> None:
    old, middle, new = (ready(name, 9, 30, LIMITS) for name in (0, 1, 2))  # one full page each
    plan = plan_step([old, middle, new], deque(), 1, LIMITS)
    assert plan.preempt == (new,) and plan.decode == (old, middle) and plan.pages_from_pool == 1


def test_one_that_waits_with_pages_gives_way_before_one_that_runs() -> None:
    running, waiting = ready(0, 9, 30, LIMITS), ready(1, 20, 30, LIMITS)
    plan = plan_step([running], deque([waiting]), 0, LIMITS)
    assert plan.preempt == (waiting,) and plan.decode == (running,)


def test_with_nothing_running_the_newest_makes_room_for_the_head() -> None:
    head, middle, newest = (ready(name, 9, 30, LIMITS) for name in (0, 1, 2))  # each lacks a page for its next token
    plan = plan_step([], deque([head, middle, newest]), 0, LIMITS)
    assert (plan.preempt, plan.admit, plan.decode, plan.pages_from_pool) == ((newest,), (head,), (head,), 0)


def test_with_all_pages_held_elsewhere_everybody_waits() -> None:
    head, other = ready(0, 17, 30, LIMITS), prompt(1, 5, 5)
    assert plan_step([], deque([head, other]), 0, LIMITS) == StepPlan((), (), (), (), ())


def test_admission_leaves_a_page_for_each_that_runs() -> None:
    """Else the newcomer is computed, only to be preempted at the next page border."""
    running = [ready(name, 10, 30, LIMITS) for name in (0, 1)]  # their pages have room left
    for item in running:
        item.held_pages = 2
    new, come_with_pages = prompt(2, 24, 5), ready(2, 24, 5, LIMITS)
    assert plan_step(running, deque([new]), 4, LIMITS).admit == ()
    assert plan_step(running, deque([new]), 5, LIMITS).admit == (new,)
    assert plan_step(running, deque([come_with_pages]), 0, LIMITS).admit == (come_with_pages,)
