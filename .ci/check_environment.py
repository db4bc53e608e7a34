"""Says in one line each what libfabric and which build of torch this environment has, and what to do about it.

`make setup` ends with this. A missing libfabric is told, not fatal: the tests that need none still run.
"""

import sys
from importlib.metadata import version
from shutil import which

from transport.dll import load_libfabric
from transport.errors import TransportError


def libfabric_line() -> str:
    """What a node would take; a missing one says what to install."""
    try:
        library = load_libfabric()
    except TransportError as error:
        return str(error)
    return "libfabric {}.{} from {}".format(*library.version, library.path)


def torch_line() -> str:
    found = version("torch")
    if which("nvidia-smi") is None and "+cpu" not in found and sys.platform == "linux":
        return f"torch {found}: works, with CUDA libraries unused here; CONTRIBUTING.md says how to get the CPU build"
    return f"torch {found}"


if __name__ == "__main__":
    print(f"setup: {libfabric_line()}")
    print(f"setup: {torch_line()}")
