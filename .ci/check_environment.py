"""Says in one line each what libfabric and which build of torch this environment has, and what to do about it.

`make setup` ends with this. A missing libfabric is told, not fatal: the tests that need none still run.
"""

import ctypes
import sys
from importlib.metadata import version
from pathlib import Path
from shutil import which

LIBFABRIC = ("libfabric.so.1", str(Path(sys.prefix) / "lib" / "mpich" / "libfabric.so.1"))


def libfabric_line() -> str:
    """The system's library comes first, as at run time: hosts with special NICs bring their own."""
    for path in LIBFABRIC:
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        packed = library.fi_version()
        return f"libfabric {packed >> 16}.{packed & 0xFFFF} from {path}"
    return (
        "libfabric cannot be loaded: install your system's package (Debian, Ubuntu: apt-get install libfabric1), "
        "or set transport.libfabric to the library's path"
    )


def torch_line() -> str:
    found = version("torch")
    if which("nvidia-smi") is None and "+cpu" not in found and sys.platform == "linux":
        return f"torch {found}: works, with CUDA libraries unused here; CONTRIBUTING.md says how to get the CPU build"
    return f"torch {found}"


if __name__ == "__main__":
    print(f"setup: {libfabric_line()}")
    print(f"setup: {torch_line()}")
