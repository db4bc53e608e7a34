from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.transport.pair import Full, Opener, Pair
from tests.transport.providers import OPENERS, chosen, engine
from tests.transport.remote import PeerProcess
from transport.fabric.leftovers import remove_leftovers

_idle: list[PeerProcess] = []
"""Processes that a test is done with and has not killed: starting one takes seconds where the cores are busy."""


@atexit.register
def _close_idle() -> None:
    for peer in _idle:
        peer.close()


@pytest.fixture
def peers() -> Iterator[Callable[[], PeerProcess]]:
    started: list[PeerProcess] = []

    def start() -> PeerProcess:
        started.append(_idle.pop() if _idle else PeerProcess())
        return started[-1]

    yield start
    for peer in started:
        if peer.shut():
            _idle.append(peer)
        else:
            peer.kill()
            remove_leftovers(peer.pid)


@pytest.fixture
def full() -> Callable[[], Full]:
    return Full


@pytest.fixture
def open_engine() -> Callable[..., Opener]:
    return engine


@pytest.fixture(params=chosen())
def openers(request: pytest.FixtureRequest) -> tuple[Opener, Opener]:
    return OPENERS[request.param]()


@pytest.fixture
def make_pair(openers: tuple[Opener, Opener]) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(**kwargs: Any) -> Pair:
        made.append(Pair(openers, **kwargs))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair()
