"""What `pdserve doctor` does with its arguments. The composition root of the doctor."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from pdserve.config import Settings, load_settings
from pdserve.doctor.checks import run_checks
from pdserve.doctor.report import Check, as_json, exit_status, fail, render
from pdserve.doctor.system import this_system
from pdserve.observe import progress
from transport.dll import ADVICE
from transport.errors import LibraryMissing


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """`library`: the path of libfabric, `provider`: for the transfer; else what the settings say.

    With `listen` (PORT or HOST:PORT) or `peer` (HOST or HOST:PORT) it is the transfer that is checked, and that alone.
    """

    config: str | None = None
    library: str | None = None
    provider: str | None = None
    listen: str | None = None
    peer: str | None = None
    json: bool = False


def run(options: DoctorOptions) -> int:
    """Prints the findings; the exit status. Raises ConfigError."""
    settings = load_settings(options.config)
    if options.listen is None and options.peer is None:
        with progress("looking around"):
            checks = run_checks(this_system(settings, options.library))
    else:
        checks = _transfer(options, settings)
    print(as_json(checks) if options.json else render(checks, colour=_colour()))
    return exit_status(checks)


def _transfer(options: DoctorOptions, settings: Settings) -> list[Check]:
    from pdserve.doctor import peer
    from pdserve.doctor.hello import PeerOptions

    transport = settings.transport
    asked = PeerOptions(options.provider or transport.provider, options.library or transport.libfabric)
    try:
        return (
            peer.listen(options.listen, asked) if options.listen is not None else peer.meet(options.peer or "", asked)
        )
    except LibraryMissing as error:
        return [fail("libfabric", str(error).removesuffix(f"; {ADVICE}"), ADVICE)]


def _colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
