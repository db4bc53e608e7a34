import pytest

from pdserve.bench.transport.quiet import LIMIT_CORES, Gate, busy_between, busy_cores

BEFORE = "cpu  100 0 50 1000 10 0 0 0 0 0\ncpu0 50 0 25 500 5 0 0 0 0 0\ncpu1 50 0 25 500 5 0 0 0 0 0\nintr 1\n"
AFTER = "cpu  140 0 60 1040 20 0 0 0 0 0\ncpu0 90 0 35 500 5 0 0 0 0 0\ncpu1 50 0 25 540 15 0 0 0 0 0\nintr 2\n"


def test_busy_cores_are_what_was_neither_idle_nor_waiting():
    assert busy_between(BEFORE, AFTER) == pytest.approx(1.0)
    assert busy_between(BEFORE, BEFORE) == 0.0


def test_this_machine_can_be_looked_at():
    assert 0.0 <= busy_cores(0.05) <= 1024


class Machine:
    """Busy for the first looks."""

    def __init__(self, *looks):
        self.looks, self.taken = list(looks), 0

    def __call__(self, look_s):
        self.taken += 1
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


def test_a_quiet_machine_is_measured_at_once_and_without_a_word():
    told, machine = [], Machine(0.1)
    gate = Gate(600.0, told.append, machine)
    gate.before_section()
    assert (told, machine.taken, gate.looks) == ([], 1, [0.1])


def test_a_busy_machine_is_warned_of_once_when_nobody_waits():
    told, machine = [], Machine(1.5)
    gate = Gate(0.0, told.append, machine)
    for _ in range(3):
        gate.before_section()
        gate.before_round()
    assert len(told) == 1 and "1.5 of" in told[0] and "--wait-quiet" in told[0]
    assert machine.taken == 3 and gate.looks == [1.5] * 3


def test_who_waits_goes_on_when_it_is_quiet():
    told, machine = [], Machine(1.5, 1.2, 0.9, LIMIT_CORES)
    gate = Gate(600.0, told.append, machine)
    gate.before_section()
    assert len(told) == 1 and "waiting up to 600 s" in told[0] and gate.looks == [LIMIT_CORES]
    gate.before_round()
    assert machine.taken == 5


def test_patience_ends_and_is_then_said_to_have_ended():
    told = []
    gate = Gate(0.001, told.append, Machine(2.0))
    gate.before_section()
    assert "it did not become quiet" in told[-1]
