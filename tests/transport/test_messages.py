"""Messages between two ends whose NICs may die: in order, each once, within the credits. No fabric."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from transport import messages
from transport.api import MAX_MESSAGE_BYTES
from transport.errors import BacklogFull, MessageTooLarge
from transport.messages import CREDITS, EXTRA_BUFFERS, FRAGMENT_BYTES, MAX_BACKLOG_BYTES, MessageFlow

PAYLOAD = FRAGMENT_BYTES - 24


def _pass_on(sender, receiver, most=10**6):
    """Moves fragments until nothing moves; returns the messages that came to the receiver, and to the sender."""
    there, here = [], []
    for _ in range(most):
        moved = False
        for one, other, came in ((sender, receiver, there), (receiver, sender, here)):
            fragment = one.next()
            if fragment is not None:
                assert len(fragment) <= FRAGMENT_BYTES
                came.extend(other.arrived(fragment))
                moved = True
        if not moved:
            return there, here
    raise AssertionError("it never comes to rest")


@pytest.mark.parametrize("length", [0, 1, PAYLOAD - 1, PAYLOAD, PAYLOAD + 1, 3 * PAYLOAD, 1 << 20])
def test_any_length_arrives_whole(length):
    one, two = MessageFlow(), MessageFlow()
    message = bytes(range(256)) * (length // 256 + 1)
    one.submit(message[:length])
    one.submit(b"next")
    assert _pass_on(one, two) == ([message[:length], b"next"], [])
    assert (one.sent, two.received) == (2, 2)


def test_no_more_fragments_than_credits_without_an_acknowledgement():
    one = MessageFlow(credits=4)
    for n in range(10):
        one.submit(bytes([n]))
    sent = []
    while (fragment := one.next()) is not None:
        sent.append(fragment)
    assert len(sent) == 4 and not one.wants_to_send
    two = MessageFlow(credits=4)
    for fragment in sent:
        two.arrived(fragment)
    one.arrived(two.next())
    assert one.wants_to_send


def test_acknowledgements_alone_are_few():
    one, two = MessageFlow(), MessageFlow()
    for _ in range(10 * CREDITS):
        one.submit(b"x")
    alone = 0
    while one.wants_to_send or two.wants_to_send:
        while (fragment := one.next()) is not None:
            two.arrived(fragment)
        while (fragment := two.next()) is not None:
            alone += 1
            one.arrived(fragment)
    assert alone <= 20


def test_a_repetition_is_answered_once():
    """The peer's buffers hold its credits and EXTRA_BUFFERS: an answer to each repeated fragment would overrun them."""
    one, two = MessageFlow(), MessageFlow()
    for _ in range(CREDITS - 1):
        one.submit(b"x")
    while (fragment := one.next()) is not None:
        two.arrived(fragment)
    while two.next() is not None:
        pass  # its acknowledgements die with a NIC
    one.repeat()
    again = 0
    while (fragment := one.next()) is not None:
        again += 1
        assert two.arrived(fragment) == []
    answers = []
    while (fragment := two.next()) is not None:
        answers.append(fragment)
    assert again == CREDITS - 1 and 1 <= len(answers) <= EXTRA_BUFFERS
    one.arrived(answers[-1])
    one.repeat()
    assert one.next() is not None and one.next() is None, "nothing is left but to tell what has come here"


def test_what_is_too_large_or_too_much_is_refused():
    flow = MessageFlow()
    with pytest.raises(MessageTooLarge, match="use a write"):
        flow.check(bytes(MAX_MESSAGE_BYTES + 1))
    largest = bytes(MAX_MESSAGE_BYTES)
    taken = 0
    with pytest.raises(BacklogFull, match="bytes of messages wait"):
        while True:
            flow.check(largest)
            taken += 1
    assert taken == MAX_BACKLOG_BYTES // MAX_MESSAGE_BYTES - 1


def test_empty_messages_fill_the_backlog_too(monkeypatch):
    monkeypatch.setattr(messages, "MAX_BACKLOG_BYTES", 1000)
    flow = MessageFlow()
    with pytest.raises(BacklogFull):
        for _ in range(100):
            flow.check(b"")


def test_what_was_acknowledged_waits_no_longer(monkeypatch):
    monkeypatch.setattr(messages, "MAX_BACKLOG_BYTES", 100_000)
    one, two = MessageFlow(), MessageFlow()
    for _ in range(100):
        one.check(bytes(20_000))
        one.submit(bytes(20_000))
        assert _pass_on(one, two) == ([bytes(20_000)], [])


@pytest.mark.parametrize(
    "damaged",
    [b"", b"short", bytes(23), bytes(16) + b"\x05" + bytes(7), bytes(16) + b"\0\0\0\0\x09\0\0\0", b"\xff" * 24,
     bytes(8) + b"\x01" + bytes(15), (CREDITS).to_bytes(8, "little") + bytes(16)],
)  # fmt: skip
def test_damaged_fragments_are_refused(damaged):
    flow = MessageFlow()
    with pytest.raises(ValueError):
        flow.arrived(damaged)


class TwoEnds(RuleBasedStateMachine):
    """Two flows over `alive` NICs. Fragments may overtake each other; those of a NIC that dies may be lost."""

    def __init__(self):
        super().__init__()
        self.flows = MessageFlow(credits=4), MessageFlow(credits=4)
        self.wires = deque(), deque()  # (nic, fragment) towards the other end
        self.sent, self.came = ([], []), ([], [])
        self.nic, self.number = 0, 0

    @rule(end=st.integers(0, 1), fragments=st.integers(0, 6), odd=st.integers(0, 40))
    def submit(self, end, fragments, odd):
        self.number += 1
        message = self.number.to_bytes(4, "little") * (fragments * PAYLOAD // 4) + bytes(odd)
        self.flows[end].submit(message)
        self.sent[end].append(message)

    @rule(end=st.integers(0, 1), most=st.integers(1, 8))
    def send(self, end, most):
        for _ in range(most):
            wanted = self.flows[end].wants_to_send
            fragment = self.flows[end].next()
            assert wanted == (fragment is not None)
            if fragment is None:
                break
            self.wires[end].append((self.nic, fragment))

    @rule(end=st.integers(0, 1), at=st.integers(0, 20))
    def arrive(self, end, at):
        wire = self.wires[end]
        if wire:
            wire.rotate(-(at % len(wire)))
            self.came[1 - end].extend(self.flows[1 - end].arrived(wire.popleft()[1]))

    @rule(lost=st.lists(st.booleans(), max_size=12))
    def nic_dies(self, lost):
        """What is under way arrives now or never."""
        for end in (0, 1):
            for n, (_, fragment) in enumerate(list(self.wires[end])):
                if not (lost[n % len(lost)] if lost else True):
                    self.came[1 - end].extend(self.flows[1 - end].arrived(fragment))
            self.wires[end].clear()
        self.nic += 1
        for flow in self.flows:
            flow.repeat()

    @invariant()
    def in_order_and_each_once(self):
        for end in (0, 1):
            assert self.came[1 - end] == self.sent[end][: len(self.came[1 - end])]

    @invariant()
    def within_the_buffers(self):
        for wire in self.wires:
            assert len(wire) <= 4 + EXTRA_BUFFERS

    def teardown(self):
        for _ in range(10_000):
            moved = False
            for end in (0, 1):
                while self.flows[end].wants_to_send:
                    self.send(end, 1)
                    moved = True
                while self.wires[end]:
                    self.arrive(end, 0)
                    moved = True
            if not moved:
                break
        assert not moved
        assert list(self.came) == [self.sent[1], self.sent[0]]


TestTwoEnds = TwoEnds.TestCase
TestTwoEnds.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
