"""Short pauses, so that what is repeated or given up after a while takes no time here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdserve.messenger import attempts, jobs, sources
from tests.pdserve.messenger.pair import Network, loopback


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "REROUTE_PAUSE_S", 0.02)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancels that are not answered, and writes that do not complete, are soon given up."""
    monkeypatch.setattr(attempts, "CANCEL_PATIENCE_S", 0.1)
    monkeypatch.setattr(sources, "DRAIN_PATIENCE_S", 0.2)


@pytest.fixture
def network() -> Iterator[Network]:
    with loopback() as made:
        yield made
