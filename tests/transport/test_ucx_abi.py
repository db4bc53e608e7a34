"""Compares the declarations with UCX's headers, by a C program that prints sizes, offsets and values."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from transport.ucx import abi, loops

FOLDERS = (
    *filter(None, os.environ.get("CPATH", "").split(":")),
    f"{sysconfig.get_path('purelib')}/libucx/include",
    "/usr/include",
    "/usr/local/include",
)
GREW = {"ucp_params", "ucp_context_attr", "ucp_mem_map_params", "ucp_request_param_t"}
"""Later versions have longer tails: sizes are not compared."""
OUR_OWN = {"tail"}
_PROGRAM = """
#include <stdio.h>
#include <stddef.h>
#include <ucp/api/ucp.h>
int main(void) {
%s
return 0; }
"""


def _structs():
    return {
        name: kind
        for name, kind in vars(abi).items()
        if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and kind is not ctypes.Structure
    }


def _constants():
    names = {name: value for name, value in vars(abi).items() if name.startswith(("UCP_", "UCS_"))}
    return {name: value for name, value in names.items() if isinstance(value, int)}


def _c_name(name):
    return name if name == "ucp_request_param_t" else f"{name}_t"


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: install gcc to compare the declarations with the headers")
    folder = next((f for f in FOLDERS if (Path(f) / "ucp" / "api" / "ucp.h").exists()), None)
    if folder is None:
        pytest.skip("no UCX headers: install libucx-dev or libucx-cu12, or name their folder in CPATH, to compare")
    lines = []
    for name, kind in _structs().items():
        lines.append(f'printf("{name} %zu\\n", sizeof({_c_name(name)}));')
        fields = [field for field, *_ in kind._fields_ if field not in OUR_OWN]
        lines += [f'printf("{name}.{f} %zu\\n", offsetof({_c_name(name)}, {f}));' for f in fields]
    lines += [f'printf("{name} %lld\\n", (long long) ({name}));' for name in _constants()]
    lines.append('printf("status %zu\\n", sizeof(ucs_status_t));')
    work = tmp_path_factory.mktemp("abi")
    (work / "probe.c").write_text(_PROGRAM % "\n".join(lines))
    subprocess.run([compiler, "-w", f"-I{folder}", "probe.c", "-o", "probe"], cwd=work, check=True)
    output = subprocess.run([work / "probe"], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in (line.split() for line in output.splitlines())}


@pytest.mark.parametrize("name", _structs())
def test_struct(printed, name):
    kind = _structs()[name]
    for field, *_ in kind._fields_:
        if field not in OUR_OWN:
            assert getattr(kind, field).offset == printed[f"{name}.{field}"], field
    if name in GREW:
        assert ctypes.sizeof(kind) >= printed[name] or "tail" not in dict(kind._fields_)
    else:
        assert ctypes.sizeof(kind) == printed[name]


def test_constants(printed):
    assert {name: printed[name] for name in _constants()} == _constants()


def test_what_the_loops_assume(printed):
    assert printed["status"] == ctypes.sizeof(abi.status_t) == 1
    assert loops._IN_PROGRESS == abi.UCS_INPROGRESS and loops._LEAST_STATUS == abi.UCS_ERR_LAST
    assert loops._REPLY_EP == abi.UCP_AM_RECV_ATTR_FIELD_REPLY_EP
    assert loops._RENDEZVOUS == abi.UCP_AM_RECV_ATTR_FLAG_RNDV
    assert (printed["ucp_am_recv_param.recv_attr"], printed["ucp_am_recv_param.reply_ep"]) == (0, 8)
