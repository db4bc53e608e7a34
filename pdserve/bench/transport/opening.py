"""Which contestants there are for a plan, and how they are started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.bench.transport.child_process import Child, SideFailed, start_here, start_there
from pdserve.bench.transport.external import PROGRAMS, External, find_program
from pdserve.bench.transport.load import SideSpec
from pdserve.bench.transport.pair import Pair
from pdserve.bench.transport.plan import Plan

PEERS = {"nixl": ("tcp", "shm"), "mooncake": ("tcp",)}
PROBE = "raw-ctypes"
"""Only pinged."""

Report = Callable[[str], None]


@dataclass(slots=True)
class Contestants:
    """Open ones. `movers` move pages, `probes` are only pinged."""

    movers: list[Pair | External] = field(default_factory=list)
    probes: list[Pair] = field(default_factory=list)

    @property
    def pairs(self) -> list[Pair]:
        return [mover for mover in self.movers if isinstance(mover, Pair)]

    def close(self) -> None:
        for contestant in (*self.movers, *self.probes):
            contestant.close()


def open_all(plan: Plan, report: Report) -> Contestants:
    """Raises SideFailed where one of ours does not start; others are left out, with a report.

    So are ours on a provider that nobody has asked for by name.
    """
    opened = Contestants()
    try:
        for wire in plan.wires:
            try:
                _open_ours(plan, wire, opened)
            except SideFailed as error:
                if plan.wires_asked:
                    raise
                report(f"left out: {error}")
                continue
            if plan.connect is None:
                _open_others(plan, wire, opened, report)
    except BaseException:
        opened.close()
        raise
    if not opened.movers:
        raise SideFailed("there is nothing to measure: none of the transports could be opened, see above")
    return opened


def _open_ours(plan: Plan, wire: str, opened: Contestants) -> None:
    if wire == "ucx":
        opened.movers.append(_pair(plan, "ucx", wire))
        return
    one, several = plan.nic_on(wire), plan.nics_on(wire)
    opened.movers.append(_pair(plan, "engine", wire, one))
    if len(several[0]) > 1:
        opened.movers.append(_pair(plan, f"engine/{len(several[0])} NICs", wire, several))
    opened.movers.append(_pair(plan, "raw", wire, one))
    if "latency" in plan.sections:
        opened.probes.append(_pair(plan, PROBE, wire, one))


def _open_others(plan: Plan, wire: str, opened: Contestants, report: Report) -> None:
    for name, providers in PEERS.items():
        if plan.peers_python is not None and wire in providers:
            try:
                opened.movers.append(_pair(plan, name, wire, python=plan.peers_python))
            except SideFailed as error:
                report(f"left out: {error}")
    for program in PROGRAMS:
        if plan.programs and wire in program.providers:
            binary = find_program(program, plan.fabtests)
            if binary is None:
                report(f"left out: {program.system} ({program.binary} is not on PATH)")
            else:
                opened.movers.append(External(program, binary, wire, plan.window, plan.cpus))


def _pair(
    plan: Plan,
    system: str,
    wire: str,
    nics: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
    python: str | None = None,
) -> Pair:
    sides: list[Child] = []
    try:
        for sends in (True, False):
            which = 0 if sends else 1
            spec = SideSpec(system, wire, sends, plan.total_bytes, plan.window, nics[which], plan.cpus[which])
            there = plan.connect if not sends else None
            sides.append(start_there(spec, there) if there else start_here(spec, *filter(None, (python,))))
    except BaseException:
        for side in sides:
            side.close()
        raise
    return Pair(system, wire, (sides[0], sides[1]))
