"""The Debian packages behind the guest. Its tools are installed; its kernel is only unpacked into the cache."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

PACKAGES = (
    "qemu-system-x86",
    "busybox-static",
    "cpio",
    "kmod",
    "iproute2",
    "rdma-core",
    "ibverbs-providers",
    "libibverbs1",
    "librdmacm1",
)
"""What must be on the host; the guest runs on the host's root, so the RDMA libraries are among them."""

MODULES = (
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "overlay",
    "virtio_rng",
    "veth",
    "crc32_generic",  # rdma_rxe asks for it by an alias, which nothing in the guest resolves
    "rdma_rxe",
    "rdma_ucm",
    "sch_netem",
)
_META_PACKAGE = "linux-image-amd64"


class GuestError(Exception):
    """The guest cannot be made or run; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """An unpacked kernel. `modules` holds the needed ones and `order`, their file names in the order of loading."""

    name: str
    image: Path
    modules: Path


def install_packages() -> None:
    """Installs what is missing of PACKAGES. Raises GuestError where rights or an archive are lacking."""
    if platform.machine() != "x86_64" or shutil.which("apt-get") is None:
        raise GuestError("the guest needs Debian or a relative of it on x86-64, with apt-get")
    missing = [package for package in PACKAGES if not _is_installed(package)]
    if not missing:
        return
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if os.geteuid() != 0:
        raise GuestError(f"packages are missing; install them and try again: sudo {' '.join(command)}")
    print(f"rdma_vm: installing {', '.join(missing)}", flush=True)
    _apt("update")
    _run(command, {"DEBIAN_FRONTEND": "noninteractive"})


def find_kernel(cache: Path) -> Kernel:
    """The kernel in `cache`; where there is none, the archive's newest is fetched (70 MB) and what is needed is kept.

    Raises GuestError.
    """
    folder = cache / f"kernel-{hashlib.sha256(' '.join(MODULES).encode()).hexdigest()[:12]}"
    if not folder.exists():
        _fetch_kernel(cache, folder)
    return Kernel((folder / "name").read_text(), folder / "vmlinuz", folder / "modules")


def _fetch_kernel(cache: Path, folder: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        root = Path(scratch) / "root"
        package = _download_kernel(Path(scratch))
        _run(["dpkg-deb", "--extract", str(package), str(root)])
        (image,) = root.glob("boot/vmlinuz-*")
        release = image.name.removeprefix("vmlinuz-")
        _run(["depmod", "--basedir", str(root), release])
        kept = Path(scratch) / "kept"
        (kept / "modules").mkdir(parents=True)
        shutil.copy(image, kept / "vmlinuz")
        files = _load_order(root, release)
        for file in files:
            shutil.copy(file, kept / "modules")
        (kept / "modules" / "order").write_text("".join(f"{file.name}\n" for file in files))
        (kept / "name").write_text(release)
        kept.rename(folder)


def _download_kernel(folder: Path) -> Path:
    name = _newest_kernel()
    if name is None:
        _apt("update")
        name = _newest_kernel()
    if name is None:
        raise GuestError(f"no package of this archive provides a kernel by the name {_META_PACKAGE}; Debian's has it")
    print(f"rdma_vm: fetching {name}", flush=True)
    command = ["apt-get", "download", name]
    try:
        _run(command, cwd=folder)
    except GuestError:  # the lists are older than the archive
        _apt("update")
        _run(["apt-get", "download", _newest_kernel() or name], cwd=folder)
    (package,) = folder.glob("*.deb")
    return package


def _newest_kernel() -> str | None:
    found = subprocess.run(["apt-cache", "depends", _META_PACKAGE], capture_output=True, text=True, check=False)
    match = re.search(r"Depends: (linux-image-\d\S*)", found.stdout)
    return match[1] if match else None


def _load_order(root: Path, release: str) -> list[Path]:
    """The files of MODULES and of what these depend on, each after what it depends on."""
    files: dict[Path, None] = {}
    for module in MODULES:
        command = ["modprobe", "--dirname", str(root), "--set-version", release, "--show-depends", module]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise GuestError(f"the kernel {release} has no module {module}: {done.stderr.strip()}")
        words = [line.split() for line in done.stdout.splitlines()]
        files.update((Path(line[1]), None) for line in words if line[0] == "insmod")
    return list(files)


def _is_installed(package: str) -> bool:
    command = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout == "installed"


def _apt(*words: str) -> None:
    if os.geteuid() != 0:
        raise GuestError(f"apt's lists are missing or old; run and try again: sudo apt-get {' '.join(words)}")
    _run(["apt-get", *words])


def _run(command: list[str], environment: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    """Raises GuestError with what the command said."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise GuestError(f"`{' '.join(command)}` failed:\n{done.stdout.strip()}")
