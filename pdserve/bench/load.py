"""The load of `pdserve bench serve`: streams that never pause, and long prompts that arrive among them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from pdserve.errors import PdserveError
from pdserve.workload.server_client import ServerClient

ERROR_PAUSE_S = 0.5  # a server that is gone is not asked in a tight loop
VOCABULARY = range(1_000, 40_000)  # ordinary tokens of the embedded model


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` clients ask again as soon as they are answered; a long prompt arrives every `long_every_s`."""

    streams: int = 4
    stream_prompt: int = 64
    stream_output: int = 96
    long_prompt: int = 1_024
    long_output: int = 8
    long_every_s: float = 10.0
    window_s: float = 45.0


@dataclass(slots=True)
class Measured:
    """Times in seconds. Only what began within the window counts."""

    inter_token: list[float] = field(default_factory=list)  # of the streams
    stream_ttft: list[float] = field(default_factory=list)
    long_ttft: list[float] = field(default_factory=list)
    stream_rate: list[float] = field(default_factory=list)  # tokens a second of each answer, first token excluded
    tokens: int = 0
    errors: list[str] = field(default_factory=list)


def run_load(client: ServerClient, model: str, load: Load, seed: int) -> Measured:
    """Blocks until everything that was begun has been answered."""
    measured, lock = Measured(), threading.Lock()
    end = time.monotonic() + load.window_s

    def streams(index: int) -> None:
        draw = random.Random(f"{seed}/{index}")
        while time.monotonic() < end:
            arrivals = _ask(client, model, draw, load.stream_prompt, load.stream_output, measured)
            with lock:
                _record_stream(measured, arrivals)

    def one_long(index: int) -> None:
        arrivals = _ask(client, model, random.Random(f"{seed}/l{index}"), load.long_prompt, load.long_output, measured)
        with lock:
            measured.long_ttft += arrivals[:1]

    threads = [_started(streams, index) for index in range(load.streams)]
    for index in range(int(load.window_s / load.long_every_s)):
        time.sleep(load.long_every_s / 2 if index == 0 else load.long_every_s)
        threads.append(_started(one_long, index))
    for thread in threads:
        thread.join()
    return measured


def _started(target: Callable[[int], None], index: int) -> threading.Thread:
    thread = threading.Thread(target=target, args=(index,), name=f"load-{index}")
    thread.start()
    return thread


def _record_stream(measured: Measured, arrivals: list[float]) -> None:
    if len(arrivals) < 2:
        return
    measured.stream_ttft.append(arrivals[0])
    measured.inter_token += [after - before for before, after in pairwise(arrivals)]
    measured.stream_rate.append((len(arrivals) - 1) / (arrivals[-1] - arrivals[0]))
    measured.tokens += len(arrivals)


def _ask(
    client: ServerClient, model: str, draw: random.Random, prompt: int, output: int, measured: Measured
) -> list[float]:
    """Arrival time of each token, in seconds after the request was sent."""
    body = {
        "model": model,
        "prompt": [draw.choice(VOCABULARY) for _ in range(prompt)],
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    sent = time.monotonic()
    arrivals: list[float] = []
    try:
        for event in client.stream("/v1/completions", body):
            now = time.monotonic() - sent
            arrivals += [now] * len(event["choices"][0]["token_ids"])
    except (PdserveError, OSError) as error:
        measured.errors.append(str(error))
        time.sleep(ERROR_PAUSE_S)
    return arrivals
