"""What a node says of itself, and what it hears of others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ray.exceptions import RayError

from actors.global_scheduler import ReplicaReport
from actors.names import scheduler_handle
from actors.node_core import NodeCore
from pdserve.messenger.wire import NodeCard

_log = logging.getLogger(__name__)

REPORT_S = 0.2
REPORT_TIMEOUT_S = 5.0

Report = Callable[[], tuple[ReplicaReport, ...]]
OnPeers = Callable[[list[NodeCard]], None]


class Reporter:
    """A thread that tells the global scheduler how this node's replicas are, and hears of prefill replicas.

    It also ends the process when the transport's worker has died.
    """

    def __init__(self, core: NodeCore, report: Report, on_peers: OnPeers | None = None) -> None:
        self._core = core
        self._report = report
        self._on_peers = on_peers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pdserve-reporter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(REPORT_S):
            fault = self._core.transports.fault()
            if fault is not None:
                self._core.end_process(f"its transport has failed: {fault}")
            try:
                peers = scheduler_handle().report.remote(self._report()).future().result(REPORT_TIMEOUT_S)
                if self._on_peers is not None:
                    self._on_peers(peers)
            except (RayError, ValueError, TimeoutError) as error:
                _log.info("the global scheduler cannot be reached: %s", error)
            except Exception:
                _log.exception("a report failed")
