"""A child process that loads one library and prints what it is, as JSON.

Two versions of one library do not live well in a process, and a broken one may crash it: so each has its own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def probe_libfabric(path: str | None) -> dict[str, Any]:
    """Path, version and the providers that open; raises LibraryMissing."""
    from transport.dll import load_libfabric
    from transport.fabric.info import available

    library = load_libfabric(path)
    version = ".".join(map(str, library.version))
    return {"path": library.path, "version": version, "providers": available(library)}


def probe_libucp(path: str | None) -> dict[str, Any]:
    """Path and version; raises LibraryMissing."""
    from transport.ucx.dll import load_libucp

    library = load_libucp(path)
    return {"path": library.path, "version": ".".join(map(str, library.version))}


def main() -> None:
    kind, path = sys.argv[1], sys.argv[2] or None
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        answer = {"libfabric": probe_libfabric, "libucp": probe_libucp}[kind](path)
    except Exception as error:
        answer = {"error": str(error)}
    answers.write(json.dumps(answer))
    answers.flush()
    os._exit(0)  # a library's destructors have the last word otherwise, and some crash


if __name__ == "__main__":
    main()
