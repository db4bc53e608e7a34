"""Runs a command in a virtual machine that has RDMA NICs: `python tests/rdma_vm/guest.py pytest tests/transport`.

The command runs in this folder with this environment's programs; its exit status becomes this program's. See README.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from boot import Boot, run_in_guest, terminal_environment
from packages import GuestError, find_kernel, install_packages

from pdserve.paths import cache_dir

_FAILED = 125
"""The exit status when the guest itself has failed, as `env` and `timeout` have it."""
_KEPT = "/run/rdma_vm/kept"
_SHELL = ("setsid", "--ctty", "--wait", "/bin/bash", "-i")


def main() -> int:
    """The command's exit status, or 125 with a message."""
    arguments = _parse()
    signal.signal(signal.SIGTERM, _stop)
    cache = cache_dir() / "rdma-vm"
    boot = Boot(
        command=_SHELL if arguments.shell else arguments.command,
        folder=Path.cwd(),
        environment={**_environment(), **dict(arguments.env)},
        timeout_s=arguments.timeout_s,
        memory_mib=arguments.memory_mib,
        interactive=arguments.shell,
    )
    try:
        install_packages()
        return run_in_guest(find_kernel(cache), cache, boot)
    except GuestError as error:
        print(f"rdma_vm: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shell", action="store_true", help="a shell in the guest instead of a command")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="how long the guest may run (%(default)g)")
    parser.add_argument("--memory-mib", type=int, default=5120, help="the guest's memory (%(default)d)")
    parser.add_argument(
        "--env", metavar="NAME=VALUE", action="append", default=[], type=_assignment, help="a variable for the command"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if arguments.shell == bool(arguments.command):
        parser.error("give either a command or --shell")
    return arguments


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _environment() -> dict[str, str]:
    """The guest's own CPU makes numba compile anew: what it compiled is kept for the next time."""
    programs = Path(sys.executable).parent
    return {
        "PATH": f"{programs}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": os.environ.get("HOME", "/root"),
        "LANG": "C.UTF-8",
        "FI_UNIVERSE_SIZE": "16",  # Soft-RoCE has no room for the completion queues that the default leads to
        "NUMBA_CACHE_DIR": f"{_KEPT}/numba",
        "PYTHONDONTWRITEBYTECODE": "1",
        **terminal_environment(),
    }


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
