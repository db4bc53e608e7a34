from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.errors import OutOfPages
from pdserve.kv.pool import PageMisuse, PagePool
from pdserve.types import PageIndex

PAGES = 12


class PoolMachine(RuleBasedStateMachine):
    """Whatever happens, each page is free, used or quarantined, and nobody gets a page that another has."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.used: set[PageIndex] = set()
        self.quarantined: set[PageIndex] = set()
        self.freed = 0
        self.pool.subscribe(self._on_free)

    def _on_free(self) -> None:
        assert self.pool.free_pages > 0  # and no deadlock: the lock is not held here
        self.freed += 1

    @rule(count=st.integers(0, PAGES + 2), leave_free=st.integers(0, 3))
    def allocate(self, count: int, leave_free: int) -> None:
        free = self.pool.free_pages
        if count and count + leave_free > free:
            with pytest.raises(OutOfPages, match=f"{count} pages asked for, but {free} of {PAGES} are free"):
                self.pool.allocate(count, leave_free=leave_free)
            return
        pages = self.pool.allocate(count, leave_free=leave_free)
        assert len(set(pages)) == count and not set(pages) & (self.used | self.quarantined)
        assert all(0 <= page < PAGES for page in pages)
        self.used |= set(pages)

    def _some(self, data: st.DataObject, pages: set[PageIndex]) -> list[PageIndex]:
        return data.draw(st.lists(st.sampled_from(sorted(pages)), unique=True, min_size=1))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages, before = self._some(data, self.used), self.freed
        self.pool.free(pages)
        self.used -= set(pages)
        assert self.freed == before + 1

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        pages, before = self._some(data, self.used), self.freed
        self.pool.quarantine(pages)
        self.used -= set(pages)
        self.quarantined |= set(pages)
        assert self.freed == before

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages, before = self._some(data, self.quarantined), self.freed
        self.pool.release(pages)
        self.quarantined -= set(pages)
        assert self.freed == before + 1

    @rule(page=st.integers(-2, PAGES + 1))
    def misuse(self, page: int) -> None:
        good = sorted(self.used)[:1]
        if page not in self.used:
            with pytest.raises(PageMisuse):
                self.pool.free([*good, PageIndex(page)])
            with pytest.raises(PageMisuse):
                self.pool.quarantine([*good, PageIndex(page)])
        if page not in self.quarantined:
            with pytest.raises(PageMisuse):
                self.pool.release([PageIndex(page)])

    @invariant()
    def pages_are_conserved(self) -> None:
        assert self.pool.counts() == (
            PAGES - len(self.used) - len(self.quarantined),
            len(self.used),
            len(self.quarantined),
        )
        assert self.pool.used_pages == len(self.used) and self.pool.quarantined_pages == len(self.quarantined)


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_double_free_names_the_page() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(PageMisuse, match=f"page {pages[0]} is free, not used"):
        pool.free(pages[:1])
    with pytest.raises(PageMisuse, match="named twice"):
        pool.free([*pool.allocate(1)] * 2)


def test_unsubscribe() -> None:
    pool, calls = PagePool(2), []
    unsubscribe = pool.subscribe(lambda: calls.append("first"))
    pool.subscribe(lambda: calls.append("second"))
    pool.free(pool.allocate(1))
    unsubscribe()
    pool.free(pool.allocate(1))
    assert calls == ["first", "second", "second"]


def test_a_subscriber_may_use_the_pool() -> None:
    pool = PagePool(2)
    taken: list[PageIndex] = []
    pool.subscribe(lambda: taken.extend(pool.allocate(1)))
    pool.free(pool.allocate(2))
    assert len(taken) == 1 and pool.free_pages == 1


def test_threads_never_share_a_page() -> None:
    pool, owners, faults = PagePool(16), [0] * 16, []

    def work(me: int) -> None:
        for turn in range(1000):
            try:
                pages = pool.allocate(1 + turn % 5)
            except OutOfPages:
                continue
            for page in pages:
                if owners[page]:
                    faults.append(page)
                owners[page] = me
            for page in pages:
                if owners[page] != me:
                    faults.append(page)
                owners[page] = 0
            pool.free(pages)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and pool.counts() == (16, 0, 0)
