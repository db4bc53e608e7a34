"""The other host's part of a benchmark: starts a side for each connection that asks for one."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable

from pdserve.bench.transport.child_process import CHILD, ended


def listen(address: tuple[str, int], report: Callable[[str], None], sides: int | None = None) -> None:
    """Serves `sides` connections (None: until interrupted). Raises OSError if the address cannot be bound.

    Whoever can connect can make this host allocate memory and move bytes, and nothing else; there is no login.
    """
    children: list[subprocess.Popen[bytes]] = []
    with socket.create_server(address) as server:
        report("listening on {}:{}".format(*server.getsockname()[:2]))
        try:
            while sides is None or len(children) < sides:
                connection, (peer, *_) = server.accept()
                with connection:
                    children.append(_side(connection.fileno()))
                report(f"started a side for {peer}")
            for child in children:
                child.wait()
        except KeyboardInterrupt:
            report("interrupted")
        finally:
            for child in children:
                ended(child, patience_s=0.5)


def _side(connection: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(CHILD)], stdin=connection, stdout=connection)
