from __future__ import annotations

import io
import logging
import re
import threading
import time
from collections.abc import Iterator

import pytest

from pdserve.observe import progress, set_up_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def keep_loggers() -> Iterator[None]:
    names = ("pdserve", "actors", "transport", "policies")
    before = {name: (logging.getLogger(name).handlers, logging.getLogger(name).propagate) for name in names}
    yield
    for name, (handlers, propagate) in before.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(logging.NOTSET)


def test_a_record_is_one_line_and_told_once() -> None:
    stream = io.StringIO()
    set_up_logging("INFO", stream)
    set_up_logging("INFO", stream)
    logging.getLogger("transport.engine").info("link to %s is up", "decode-0")
    logging.getLogger("transport.engine").debug("hidden")
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} INFO    transport\.engine: link to decode-0 is up\n", stream.getvalue())


def test_quick_work_stays_silent() -> None:
    stream = io.StringIO()
    with progress("loading", stream=stream, show_after_s=30):
        pass
    assert stream.getvalue() == ""


def test_slow_work_shows_itself_and_its_outcome() -> None:
    stream = io.StringIO()
    with progress("loading", stream=stream, show_after_s=0.0) as step:
        step.update("layer 3 of 30")
        time.sleep(0.05)
    first, *_, last = stream.getvalue().splitlines()
    assert first.startswith("loading") and re.fullmatch(r"loading: done in \d\.\d s", last)


def test_a_terminal_line_is_redrawn() -> None:
    stream = Terminal()
    with progress("loading", stream=stream, show_after_s=0.0) as step:
        step.update("layer 3 of 30")
        time.sleep(0.25)
    drawn = stream.getvalue().split("\r\033[K")
    assert len(drawn) >= 3 and "(layer 3 of 30)" in drawn[2]
    assert stream.getvalue().count("\n") == 1


def test_failure_is_told_and_passes_on() -> None:
    stream = io.StringIO()
    with pytest.raises(ValueError), progress("loading", stream=stream, show_after_s=0.0):
        time.sleep(0.05)
        raise ValueError
    assert "loading: failed in" in stream.getvalue()


def test_no_thread_stays_behind() -> None:
    with progress("loading", stream=io.StringIO()):
        assert any(thread.name == "progress loading" for thread in threading.enumerate())
    assert not any(thread.name == "progress loading" for thread in threading.enumerate())
