"""A colocated engine on the toy model, which must be empty again when the test ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from pdserve.engine.engine import Engine
from pdserve.engine.local import Collector
from pdserve.engine.local import generate as generate_patiently
from pdserve.kv.pool import PagePool
from pdserve.types import Role
from tests.pdserve.engine.toy import SETTINGS, ToyModel, eventually, poisoned_memory

generate = partial(generate_patiently, timeout_s=30.0)


@contextmanager
def colocated(model: ToyModel | None = None, **changes: object) -> Iterator[tuple[Engine, Collector]]:
    settings = SETTINGS.model_copy(update=changes)
    collector = Collector()
    with (
        poisoned_memory(settings) as memory,
        Engine(
            model or ToyModel(), memory, PagePool(settings.pages), settings, Role.COLOCATED, decode_hooks=collector
        ) as engine,
    ):
        yield engine, collector
        eventually(lambda: engine.load().running + engine.load().waiting == 0)
        assert engine.pool.counts() == (engine.pool.total, 0, 0), "every page is back"
        assert engine.load().queued_prefill_tokens == 0
