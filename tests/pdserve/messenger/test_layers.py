"""Reading the engine's counter: what may be concluded, and when nothing may."""

from __future__ import annotations

import threading
from typing import Any

from pdserve.engine.hooks import Chunk
from pdserve.messenger.layers import LayerWatch
from pdserve.messenger.mailbox import Mailbox
from pdserve.messenger.wire import Accept
from pdserve.types import NodeId, RequestId
from tests.pdserve.engine.toy import eventually
from tests.pdserve.messenger.pair import PATIENCE_S, Network
from tests.pdserve.messenger.stepped import SteppedModel

CHUNKS = (Chunk(RequestId("a"), 0, 8, True),)


def test_updates_may_coalesce() -> None:
    watch = LayerWatch(6)
    assert not watch.look(3) and not watch.end()
    watch.begin(CHUNKS, 100)
    assert [list(watch.look(counter)) for counter in (100, 101, 101, 104)] == [[], [0], [], [1, 2, 3]]
    assert list(watch.end()) == [4, 5]
    assert not watch.running and not watch.look(105) and not watch.end()


def test_a_counter_beyond_the_step_says_nothing() -> None:
    watch = LayerWatch(2)
    watch.begin(CHUNKS, 100)
    assert not watch.look(103)
    assert list(watch.end()) == [0, 1]


def test_a_failed_step_says_nothing() -> None:
    watch = LayerWatch(2)
    watch.begin(CHUNKS, 100)
    watch.failed(RequestId("of another step"))
    assert list(watch.look(101)) == [0]
    watch.failed(RequestId("a"))
    assert not watch.running and not watch.look(102) and not watch.end()


class SlowWatcher:
    """The sender is held up during a step that fails in its last layer, until the next step has begun."""

    def __init__(self) -> None:
        self.step = 0
        self.all_queued = threading.Event()
        self._held, self._looks, self._goes_on = threading.Event(), threading.Event(), threading.Event()
        self.mailbox: Mailbox[Any] | None = None

    def __call__(self, layer: int) -> None:
        self.step += layer == 0
        if self.step == 1:
            assert self.all_queued.wait(PATIENCE_S)
        elif (self.step, layer) == (2, 0):
            self._hold(self._looks)
            self._hold(self._goes_on)  # else the news of the failure would stop at once what that look began
        elif (self.step, layer) == (2, 1):
            raise RuntimeError("a kernel has failed")
        elif (self.step, layer) == (3, 1):
            # Layer 0 of this step has moved the counter to where step 2 would have ended.
            self._looks.set()
            self._goes_on.wait(0.1)  # time for writes to land that should not be
            self._goes_on.set()

    def _hold(self, until: threading.Event) -> None:
        assert self.mailbox is not None
        self.mailbox.post(lambda: self._wait(until))
        assert until is self._goes_on or self._held.wait(PATIENCE_S)

    def _wait(self, until: threading.Event) -> None:
        self._held.set()
        assert until.wait(PATIENCE_S)


def test_nothing_is_concluded_about_a_failed_step_from_the_next_one(network: Network) -> None:
    """Else pages that nobody has computed would be written, and counted as complete."""
    watcher = SlowWatcher()
    prefill = network.add_prefill(model=SteppedModel(watcher))
    watcher.mailbox = prefill.sender._mail
    decode = network.add_decode()
    requests = [decode.request(f"r{n}", 17) for n in range(3)]  # a full chunk each
    eventually(lambda: len(network.channels[NodeId("d0")].of(Accept)) == 3, PATIENCE_S)
    eventually(lambda: prefill.engine.load().waiting == 3, PATIENCE_S)
    watcher.all_queued.set()
    decode.check(*requests)
    traces = [decode.receiver.trace(request.request_id) for request in requests]
    assert [trace.attempt for trace in traces if trace is not None] == [1, 2, 1]
    network.settle()


def test_mailbox_survives_what_an_event_raises() -> None:
    seen: list[str] = []

    def handle(event: str) -> None:
        if event == "bad":
            raise RuntimeError(event)
        seen.append(event)

    mailbox = Mailbox("test", handle, lambda: 1.0)
    for event in ("a", "bad", "b"):
        mailbox.post(event)
    assert not mailbox.idle
    mailbox.start()
    mailbox.close()
    assert seen == ["a", "b"] and mailbox.idle
