"""The systems that are measured, each a class that moves blocks in its own way. Imported in their processes alone.

An interpreter that has another library, but not what this project depends on, runs them too: a module imports at its
top what every such interpreter has (numpy), and the rest where it is used.
"""

from __future__ import annotations

import importlib

from pdserve.bench.transport.load import SideSpec
from pdserve.bench.transport.sides.side import Side

_MODULES = {
    "engine": "engine:EngineSide",
    "ucx": "engine:EngineSide",
    "raw": "raw:RawSide",
    "raw-ctypes": "raw_ctypes:RawCtypesSide",
    "nixl": "nixl:NixlSide",
    "mooncake": "mooncake:MooncakeSide",
}


def make_side(spec: SideSpec) -> Side:
    module, name = _MODULES[spec.system.split("/")[0]].split(":")
    made: Side = getattr(importlib.import_module(f"{__name__}.{module}"), name)(spec)
    return made
