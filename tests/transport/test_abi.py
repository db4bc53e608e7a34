"""Compares the declarations with the headers of this machine, by a C program that prints sizes, offsets and values."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from transport.fabric import abi, loops

HEADERS = ("fabric.h", "fi_domain.h", "fi_endpoint.h", "fi_cm.h", "fi_eq.h", "fi_rma.h", "fi_errno.h")
FOLDERS = (
    *filter(None, os.environ.get("CPATH", "").split(":")),
    "/usr/include",
    "/usr/local/include",
    "/opt/amazon/efa/include",
)
# Whose tails grew in later versions, or of which only the head is declared: sizes are not compared.
OPEN_ENDED = {
    "fi_ops", "fi_domain_attr", "fi_ops_fabric", "fi_ops_domain", "fi_ops_mr", "fi_ops_av", "fi_cq_err_entry",
    "fi_ops_cm", "fid_ep", "fi_mr_attr",
}  # fmt: skip
SINCE_1_20 = {"fi_mr_dmabuf", "FI_MR_DMABUF"}
OUR_OWN = {"tail"}


def _structs():
    return {
        name: kind
        for name, kind in vars(abi).items()
        if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and kind is not ctypes.Structure
    }


def _constants():
    return {name: value for name, value in vars(abi).items() if name.startswith("FI_") and isinstance(value, int)}


def _where_known(name, *lines):
    version = "FI_VERSION_GE(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION), FI_VERSION(1, 20))"
    return [f"#if {version}", *lines, "#endif"] if name in SINCE_1_20 else list(lines)


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: install gcc to compare the declarations with the headers")
    folder = next((f for f in FOLDERS if (Path(f) / "rdma" / "fabric.h").exists()), None)
    if folder is None:
        pytest.skip("no libfabric headers: install libfabric-dev to compare the declarations with them")
    lines = ["#include <stdio.h>", "#include <stddef.h>", "#include <sys/uio.h>"]
    lines += [f"#include <rdma/{header}>" for header in HEADERS]
    lines.append("int main(void) {")
    for name, kind in _structs().items():
        fields = [field for field, *_ in kind._fields_ if field not in OUR_OWN]
        prints = [f'printf("{name}.{field} %zu\\n", offsetof(struct {name}, {field}));' for field in fields]
        lines += _where_known(name, f'printf("{name} %zu\\n", sizeof(struct {name}));', *prints)
    for name in _constants():
        lines += _where_known(name, f'printf("{name} %llu\\n", (unsigned long long) ({name}));')
    lines.append('printf("context %zu\\n", sizeof(struct fi_context2));')
    lines.append("return 0; }")
    work = tmp_path_factory.mktemp("abi")
    (work / "probe.c").write_text("\n".join(lines))
    subprocess.run([compiler, "-w", f"-I{folder}", "probe.c", "-o", "probe"], cwd=work, check=True)
    output = subprocess.run([work / "probe"], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in (line.split() for line in output.splitlines())}


@pytest.mark.parametrize("name", _structs())
def test_struct(printed, name):
    kind = _structs()[name]
    if name not in printed:
        assert name in SINCE_1_20
        pytest.skip("the headers of this machine are older")
    for field, *_ in kind._fields_:
        if field not in OUR_OWN:
            assert getattr(kind, field).offset == printed[f"{name}.{field}"], field
    if name not in OPEN_ENDED:
        assert ctypes.sizeof(kind) == printed[name]


def test_constants(printed):
    constants = {name: value for name, value in _constants().items() if name in printed or name not in SINCE_1_20}
    assert {name: printed[name] for name in constants} == constants


def test_what_later_versions_append_to_a_registration_is_left_zero(printed):
    assert ctypes.sizeof(abi.fi_mr_attr) >= printed["fi_mr_attr"]
    assert not any(abi.fi_mr_attr().tail)


def test_what_the_loops_assume(printed):
    assert loops._CONTEXT_BYTES == abi.CONTEXT_BYTES == printed["context"]
    assert 8 * loops._ENTRY_WORDS == 8 * abi.CQ_ENTRY_WORDS == printed["fi_cq_data_entry"]
    assert (printed["fi_cq_data_entry.flags"], printed["fi_cq_data_entry.data"]) == (8, 32)
    assert abi.FI_REMOTE_WRITE == loops._REMOTE_WRITE and -abi.FI_EAGAIN == loops._EAGAIN
