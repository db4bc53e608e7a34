"""A Ray of our own on this machine: started for one cluster, gone with it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # a local Ray would otherwise turn tokens on for whatever else runs here
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_prestart_worker_first_driver": "0",  # one idle process per CPU, which no actor of ours would take
}
OBJECT_STORE_BYTES = 100 << 20  # nothing large goes through it
END_S = 20.0


@contextlib.contextmanager
def start_local_ray(namespace: str, cpus: int = 1, *, gpus: bool = False) -> Iterator[None]:
    """Ends every process that it started. `cpus` is what Ray counts with; `gpus`: whether this host's GPUs are its.

    The settings must be there before ray is initialised, not imported.
    """
    before = {name: os.environ.get(name) for name in _SETTINGS}
    os.environ.update(_SETTINGS)
    import ray

    before_us = _children(os.getpid())
    handlers = _python_handlers()
    try:
        ray.init(
            address="local",  # never joins a cluster that happens to run here
            namespace=namespace,
            num_cpus=cpus,
            num_gpus=None if gpus else 0,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        for number, handler in handlers.items():  # Ray's own would end us without ending what we started
            signal.signal(number, handler)
        roots = _children(os.getpid()) - before_us  # Ray's own daemons; every worker is below one of them
        try:
            yield
        finally:
            ours = roots.union(*(descendants(root) for root in roots))
            ray.shutdown()
            _await_end(ours)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _python_handlers() -> dict[int, Any]:
    """Who handles the signals that end a program; only the main thread may set them again."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}


def _by_parent() -> dict[int, set[int]]:
    children: dict[int, set[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry.name}/stat") as stat:
                parent = int(stat.read().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, set()).add(int(entry.name))
    return children


def _children(pid: int) -> set[int]:
    return _by_parent().get(pid, set())


def descendants(pid: int) -> set[int]:
    """Every process below `pid`."""
    children = _by_parent()
    found: set[int] = set()
    stack = [pid]
    while stack:
        below = children.get(stack.pop(), set())
        found |= below
        stack += below
    return found


def _await_end(pids: set[int]) -> None:
    """Ray ends its processes in its own time; who is still there after a while is told to, by pid."""
    deadline = time.monotonic() + END_S
    while alive := {pid for pid in pids if _alive(pid)}:
        if time.monotonic() > deadline:
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            return
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
