"""What a person sees while things run: one-line logs, and progress for whatever takes longer than two seconds."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

SHOW_AFTER_S = 2.0
PLAIN_REPEAT_S = 10.0
"""Where there is no terminal to redraw a line on, progress is a new line this often."""
SPINNER_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SPINNER_PERIOD_S = 0.1
LOG_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"


def set_up_logging(level: str = "INFO", stream: TextIO | None = None) -> None:
    """One human-readable line per record of this project's packages, on stderr; a second call replaces the first."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter(LOG_FORMAT, datefmt="%H:%M:%S"))
    for package in ("pdserve", "actors", "transport", "policies"):
        logger = logging.getLogger(package)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False


class Progress:
    """One piece of work that a person may wait for. Made by `progress`."""

    def __init__(self, what: str, stream: TextIO, show_after_s: float) -> None:
        self._what = what
        self._stream = stream
        self._show_after_s = show_after_s
        self._redraws = stream.isatty()
        self._detail = ""
        self._shown = False
        self._ended = threading.Event()
        self._started_s = time.monotonic()
        self._thread = threading.Thread(target=self._show, name=f"progress {what}", daemon=True)
        self._thread.start()

    def update(self, detail: str) -> None:
        """Says how far it is, for instance `layer 3 of 30`; shown with the next redraw."""
        self._detail = detail

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def close(self, outcome: str) -> None:
        self._ended.set()
        self._thread.join()
        if self._shown:
            self._write(f"{self._what}: {outcome} in {self.elapsed_s:.1f} s", last=True)

    def _show(self) -> None:
        if self._ended.wait(self._show_after_s):
            return
        self._shown = True
        period_s = SPINNER_PERIOD_S if self._redraws else PLAIN_REPEAT_S
        frame = 0
        while True:
            detail = f" ({self._detail})" if self._detail else ""
            mark = f"{SPINNER_FRAMES[frame % len(SPINNER_FRAMES)]} " if self._redraws else ""
            self._write(f"{mark}{self._what}{detail} … {self.elapsed_s:.0f} s", last=False)
            frame += 1
            if self._ended.wait(period_s):
                return

    def _write(self, text: str, *, last: bool) -> None:
        line = f"\r\033[K{text}" if self._redraws else f"{text}\n"
        self._stream.write(line + ("\n" if last and self._redraws else ""))
        self._stream.flush()


@contextmanager
def progress(what: str, *, stream: TextIO | None = None, show_after_s: float = SHOW_AFTER_S) -> Iterator[Progress]:
    """Shows `what` with the time it has taken, once that exceeds `show_after_s`; quick work stays silent.

    with progress("loading the model") as step:
        step.update("layer 3 of 30")
    """
    step = Progress(what, stream or sys.stderr, show_after_s)
    try:
        yield step
    except BaseException:
        step.close("failed")
        raise
    step.close("done")
