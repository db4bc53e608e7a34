"""Provider profiles: what is asked of each provider and what it promises beyond what `fi_getinfo` tells.

Whether remote addresses are offsets or virtual addresses and who chooses keys is *not* here: that is what came back in
`mr_mode`, and the descriptor carries its consequences.

What stands behind the entries
------------------------------
`tcp`, `tcp;ofi_rxm`, `shm`, `sockets`: shown by the tests, revocation included, over libfabric 2.5; their NICs and
registration over 1.17 too.
`verbs;ofi_rxm`: over Soft-RoCE (`rdma_rxe` of Linux 6.1, libfabric 2.5), by `tests/rdma_vm`. That nothing lands after
a close rests on the InfiniBand specification besides: a destroyed queue pair answers nothing, a deregistered key is
refused. It has not run on a ConnectX or any other RDMA NIC yet.
`efa`: written after the manual pages and headers of libfabric 2.1, which say nothing of revocation: so it is not
promised. A peer is heard only once its address was inserted, so both sides of a link connect before the first write.
It has not run on hardware yet.
`shm` does not report a killed peer, the others do: there the caller learns it otherwise and closes the link.
`sockets` can stand still for good where more than about 64 KiB are under way to a receiver that falls behind, seen with
2.5: it leaves the first bytes of a header in the kernel until the whole is there, and while they hold the buffer that
they came in with, Linux opens no window for the others. What was written then stays in flight until the link is closed.
No provider is given FI_MORE: writes are posted singly (`fi_writedata`), and on EFA batches are known to hang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transport.dll import FabricLibrary
from transport.errors import ProviderUnavailable
from transport.fabric import abi

_MR_MODES = abi.FI_MR_LOCAL | abi.FI_MR_VIRT_ADDR | abi.FI_MR_ALLOCATED | abi.FI_MR_PROV_KEY


@dataclass(frozen=True, slots=True)
class Profile:
    """One provider. What is asked of all alike (capabilities, threading, progress) is in `transport.fabric.info`."""

    name: str
    """As the settings say it; the same on both sides, whatever the library calls the provider."""
    revokes: bool
    """After regions and endpoint were closed no byte of the peer lands (`Transport.revokes`). Only where shown."""
    receiver_pulls: bool = False
    """The *receiver* copies the payload out of the sender's memory, while it polls. A link that closes with writes in
    flight waits `linger_s` for them first: a peer that is stopped for longer and then goes on may still read the
    source memory, so that memory must not be reused until the peer is known to be dead or has closed its link."""
    linger_s: float = 0.0
    within_process: bool = True
    """Two links of one process may be connected. Where not, the provider hands both the same mapping and a close of
    one crashes the other (libfabric 2.5 shm), so that is refused."""
    reach: Literal["host", "network", "rdma"] = "network"
    """Within one host; by IP interfaces, named by address or interface; by RDMA devices, named by device."""
    wait: Literal["fd", "none"] = "none"
    """Whether a completion queue can be asked for a file descriptor that wakes."""
    spins: bool = False
    """Polling without rest is worth a core here: the default of the setting."""
    cq_depth: int = 4096
    mr_modes: int = _MR_MODES
    """What registration rules this side can obey. FI_MR_ENDPOINT is not among them."""
    api_version: tuple[int, int] = (1, 17)
    """What the library is asked to behave like."""
    other_fabrics: tuple[str, ...] = ()
    """Fabric names that the provider also lists and that follow other rules: left out."""

    def max_window(self, own: int) -> int:
        """How many writes a peer may have outstanding on one endpoint, whose queue holds them beside `own` completions.

        Some providers (verbs, efa) lose what overruns a queue.
        """
        assert 0 < own < self.cq_depth
        return self.cq_depth - own


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("efa", revokes=False, reach="rdma", spins=True, cq_depth=8192,
                api_version=(1, 18), other_fabrics=("efa-direct",)),
        Profile("verbs;ofi_rxm", revokes=True, reach="rdma", wait="fd", spins=True),
        Profile("tcp", revokes=True, wait="fd"),
        Profile("tcp;ofi_rxm", revokes=True, wait="fd"),
        Profile("sockets", revokes=True, wait="fd"),
        Profile("shm", revokes=True, receiver_pulls=True, linger_s=0.25, within_process=False,
                reach="host"),
    )
}  # fmt: skip

WITHIN_HOST = frozenset(name for name, profile in PROFILES.items() if profile.reach == "host")
"""Providers that have no NICs to choose from."""

_LEFT_OUT = {
    "verbs": "its connected endpoints need a connection each way; choose 'verbs;ofi_rxm', which is the same NICs",
    "verbs;ofi_rxd": "it has no RDMA; choose 'verbs;ofi_rxm', which is the same NICs",
    "efa-direct": "it takes a receive buffer for every immediate; choose 'efa', which is the same NICs",
    "cxi": "it registers memory per endpoint (FI_MR_ENDPOINT), which nobody has tried with this program yet",
    "net": "since libfabric 1.18 that provider is called 'tcp', and this program calls it so with every version",
}


def profile_named(name: str) -> Profile:
    """Raises ProviderUnavailable for a provider that has no profile."""
    profile = PROFILES.get(name)
    if profile is not None:
        return profile
    known = ", ".join(PROFILES)
    if name in _LEFT_OUT:
        raise ProviderUnavailable(f"provider {name!r} is not supported: {_LEFT_OUT[name]}. Supported: {known}")
    raise ProviderUnavailable(f"unknown provider {name!r}; choose of: {known}")


def library_name(profile: Profile, library: FabricLibrary) -> str:
    """What this library calls the provider. Until 1.17 today's `tcp` was `net`, and `tcp` meant `tcp;ofi_rxm`."""
    if profile.name == "tcp" and library.version < (1, 18):
        return "net"
    return profile.name
