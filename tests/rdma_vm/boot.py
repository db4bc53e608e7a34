"""Boots the guest, waits for its end, and tells how its command ended."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packages import GuestError, Kernel

_INIT = Path(__file__).with_name("init")
_BUSYBOX = Path("/bin/busybox")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_GRACE_S = 10


@dataclass(frozen=True, slots=True)
class Boot:
    """What runs in the guest, and within what limits. `environment` comes on top of an empty one."""

    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 1800.0
    memory_mib: int = 5120
    interactive: bool = False


def run_in_guest(kernel: Kernel, cache: Path, boot: Boot) -> int:
    """The exit status of the command; what it prints goes to the terminal.

    `cache` gets the folder `kept`, which outlives the guest and is /run/rdma_vm/kept there. Raises GuestError.
    """
    kept = cache / "kept"
    kept.mkdir(parents=True, exist_ok=True)
    run_dir = Path(tempfile.mkdtemp(prefix="run-", dir=cache))
    _write_initramfs(kernel, run_dir / "initramfs")
    (run_dir / "command").write_text(_script(boot))
    _run_qemu(_qemu(kernel, run_dir, kept, boot), boot, run_dir)
    try:
        status = int((run_dir / "status").read_text())
    except (FileNotFoundError, ValueError):
        raise GuestError(f"the guest ended before its command did. {_console(run_dir)}") from None
    shutil.rmtree(run_dir)
    return status


def _write_initramfs(kernel: Kernel, path: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        (root / "bin").mkdir()
        shutil.copy(_BUSYBOX, root / "bin")
        shutil.copy(_INIT, root / "init")
        (root / "init").chmod(0o755)
        shutil.copytree(kernel.modules, root / "modules")
        names = "".join(f"{file.relative_to(root)}\n" for file in sorted(root.rglob("*")))
        with path.open("wb") as out:
            command = ["cpio", "--create", "--format=newc", "--quiet"]
            subprocess.run(command, input=names.encode(), stdout=out, cwd=root, check=True)


def _script(boot: Boot) -> str:
    """A shell script: each line is one step in the guest."""
    variables = [f"export {name}={shlex.quote(value)}" for name, value in boot.environment.items()]
    return "\n".join(
        [f"cd {shlex.quote(str(boot.folder))} || exit 1", *variables, f"exec {shlex.join(boot.command)}", ""]
    )


def _qemu(kernel: Kernel, run_dir: Path, kept: Path, boot: Boot) -> list[str]:
    """Two serial lines: the kernel's console goes to a file, the command's to the terminal."""
    line = "console=ttyS0 panic=-1 oops=panic mitigations=off nowatchdog tsc=reliable"
    console = str(run_dir / "console.log")
    command = ["qemu-system-x86_64", "-accel", "tcg", "-smp", "2", "-m", f"{boot.memory_mib}M"]
    command += ["-cpu", "max", "-nic", "none", "-no-reboot", "-display", "none", "-monitor", "none"]
    command += ["-kernel", str(kernel.image), "-initrd", str(run_dir / "initramfs")]
    command += ["-append", f"{line} rdma_vm.interactive" if boot.interactive else line]
    command += ["-serial", f"file:{console}", "-serial", "chardev:terminal"]
    command += ["-chardev", f"stdio,id=terminal,signal={'off' if boot.interactive else 'on'}"]
    command += ["-device", "virtio-rng-pci"]
    shares = (("root", Path("/"), ",readonly=on,multidevs=remap"), ("run_dir", run_dir, ""), ("kept", kept, ""))
    for tag, path, options in shares:
        command += ["-fsdev", f"local,id={tag},path={path},security_model=none{options}"]
        command += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    return command


def _run_qemu(command: list[str], boot: Boot, run_dir: Path) -> None:
    """Returns when the guest has ended by itself. It never outlives this call, nor this process."""
    stdin = None if boot.interactive else subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=stdin, preexec_fn=_die_with_parent)
    try:
        code = process.wait(None if boot.interactive else boot.timeout_s)
    except subprocess.TimeoutExpired:
        raise GuestError(
            f"the guest has not ended within {boot.timeout_s:g} s and was stopped; --timeout-s allows more. "
            f"{_console(run_dir)}"
        ) from None
    finally:
        _end(process)
    if code:
        raise GuestError(f"qemu failed with status {code}. {_console(run_dir)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _console(run_dir: Path) -> str:
    console = run_dir / "console.log"
    if not console.exists():
        return "It printed nothing"
    last = console.read_text(errors="replace").splitlines()[-5:]
    return "\n".join([f"The end of {console}:", *last])


def terminal_environment() -> dict[str, str]:
    """How wide the terminal is, and whether it takes colours: a serial line knows neither."""
    if not sys.stdout.isatty():
        return {"TERM": "dumb", "COLUMNS": "120", "NO_COLOR": "1"}
    size = shutil.get_terminal_size()
    return {"TERM": os.environ.get("TERM", "vt100"), "COLUMNS": str(size.columns), "LINES": str(size.lines)}
