"""Whatever the network and the nodes do: no byte lands in a page that was handed back, nothing is held for ever, counts
are exact, and every request ends once.

The page pools poison what is free and look whether it still is when they give it out. Engines, messengers and the
transport are the real ones and run in their own threads, so that a failing example need not fail again.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from pdserve.messenger import receiver
from tests.pdserve.messenger.hostile import DECODE, PREFILL, World

prefills, decodes, anyone = st.sampled_from(PREFILL), st.sampled_from(DECODE), st.sampled_from(PREFILL + DECODE)


class HostileNetwork(RuleBasedStateMachine):
    world: World
    revokes = True

    @initialize(seed=st.integers(0, 2**16), nics=st.sampled_from([1, 2]))
    def begin(self, seed: int, nics: int) -> None:
        self.world = World(seed, nics, self.revokes)
        for decode in DECODE:
            for prefill in PREFILL:
                self.world.ask(decode, prefill, 60, 8)

    @rule(decode=decodes, prefill=prefills, tokens=st.integers(1, 120), answer=st.integers(1, 12))
    def ask(self, **drawn: Any) -> None:
        self.world.ask(**drawn)

    @rule(decode=decodes, prefill=prefills, tokens=st.integers(60, 120), ms=st.integers(0, 30))
    def ask_and_cancel(self, decode: Any, prefill: Any, tokens: int, ms: int) -> None:
        for _ in range(2):
            self.world.ask(decode, prefill, tokens, 4)
        time.sleep(ms / 1000)
        self.world.cancel(-1)

    @precondition(lambda self: self.world.asked)
    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        self.world.cancel(which)

    @rule(ms=st.integers(1, 40))
    def time_passes(self, ms: int) -> None:
        time.sleep(ms / 1000)

    @rule(ms=st.sampled_from([100, 200, 400]))
    def deadlines_pass(self, ms: int) -> None:
        time.sleep(ms / 1000)

    @rule()
    def what_was_kept_arrives(self) -> None:
        self.world.adversary.release()

    @rule(decode=decodes, prefill=prefills)
    def a_prefill_node_is_cut_off_and_writes_on(self, decode: Any, prefill: Any) -> None:
        self.world.adversary.cut.add(frozenset((decode, prefill)))

    @precondition(lambda self: self.world.adversary.cut)
    @rule()
    def the_cut_heals(self) -> None:
        self.world.adversary.cut.clear()

    @rule(decode=decodes, prefill=prefills)
    def revoke(self, decode: Any, prefill: Any) -> None:
        self.world.doubt(decode, prefill)

    @rule(decode=decodes, prefill=prefills)
    def the_prefill_node_gives_up(self, decode: Any, prefill: Any) -> None:
        self.world.forget(decode, prefill)

    @rule(name=anyone)
    def a_link_breaks(self, name: Any) -> None:
        self.world.break_link(name)

    @rule(decode=decodes)
    def a_link_falls_silent(self, decode: Any) -> None:
        self.world.silence_link(decode)

    @rule(name=anyone)
    def a_nic_dies(self, name: Any) -> None:
        self.world.lose_nic(name)

    @precondition(lambda self: self.revokes and len(self.world.network.down) < len(PREFILL))
    @rule(name=prefills)
    def a_prefill_node_is_killed(self, name: Any) -> None:
        if name not in self.world.network.down:
            self.world.kill_prefill(name)

    @precondition(lambda self: self.world.network.down)
    @rule()
    def a_prefill_node_is_restarted(self) -> None:
        self.world.start_prefill(min(self.world.network.down))

    @precondition(lambda self: self.revokes)
    @rule(name=decodes, silent=st.booleans())
    def a_decode_node_is_killed(self, name: Any, silent: bool) -> None:
        self.world.kill_decode(name, silent)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.check()
            finally:
                self.world.close()


class LateWriters(HostileNetwork):
    """Closing a link keeps no write from landing. All nodes live: a dead one's end would be its process's."""

    revokes = False


def run(examples: int, steps: int, machine: type[HostileNetwork] = HostileNetwork) -> None:
    """Shrinking would run other interleavings: a failure is told as it came."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_misfortune(impatient: None) -> None:
    run(12, 25)


@pytest.fixture
def asks_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "ASK_AGAIN_S", 0.1)


def test_any_misfortune_where_nothing_is_revoked(impatient: None, asks_again_soon: None) -> None:
    run(6, 25, LateWriters)


@pytest.mark.slow
def test_much_misfortune(impatient: None) -> None:
    run(200, 50)


@pytest.mark.slow
def test_much_misfortune_where_nothing_is_revoked(impatient: None, asks_again_soon: None) -> None:
    run(100, 50, LateWriters)
