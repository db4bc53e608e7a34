"""Which provider two nodes speak: what was configured, else RDMA, else shared memory, else TCP. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from transport.errors import ProviderUnavailable

AUTO = "auto"
RDMA_PROVIDERS = ("efa", "verbs;ofi_rxm")
"""In the order of preference: an EFA device also speaks verbs, but badly."""
SLOW_FOR_GPUS = frozenset({"tcp", "tcp;ofi_rxm", "sockets"})
"""Every block goes through host memory and the kernel."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What a node can speak.

    `host` is alike for processes that share /dev/shm and a process namespace. `providers` are those that open there
    (`transport.fabric.info.available`, and `ucx`); `rdma` are those of them that have an active device, `nics` the
    names of these devices.
    """

    name: str
    host: str
    providers: tuple[str, ...]
    rdma: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()
    gpus: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """`reason` is a line that a person can read and begins with the provider."""

    provider: str
    reason: str


def choose(configured: str, mine: Reach, theirs: Reach, *, allow_tcp: bool = False) -> Choice:
    """The same provider on both sides, whichever asks. `configured`: a provider, or `auto`.

    Raises ProviderUnavailable if a side lacks what was configured, if there is nothing in common, or if a pair with
    GPUs would end on TCP and `allow_tcp` is not set; the message says what each side has.
    """
    choice = _automatic(mine, theirs) if configured == AUTO else _configured(configured, mine, theirs)
    if choice.provider in SLOW_FOR_GPUS and (mine.gpus or theirs.gpus) and not allow_tcp:
        raise ProviderUnavailable(
            f"{mine.name} and {theirs.name} have GPUs, but would speak {choice.reason}. Every block would be copied "
            f"through host memory, which allow_tcp would permit"
        )
    return choice


def _configured(provider: str, mine: Reach, theirs: Reach) -> Choice:
    for side in (mine, theirs):
        if provider not in side.providers:
            raise ProviderUnavailable(
                f"provider {provider!r} is configured, but {side.name} cannot open it; it has: "
                f"{_listed(side.providers)}"
            )
    if provider == "shm" and mine.host != theirs.host:
        raise ProviderUnavailable(
            f"provider 'shm' is configured, but {mine.name} is on host {mine.host} and {theirs.name} on {theirs.host}; "
            f"choose 'auto' or a network provider"
        )
    return Choice(provider, f"{provider}: configured")


def _automatic(mine: Reach, theirs: Reach) -> Choice:
    common = [provider for provider in mine.providers if provider in theirs.providers]
    for provider in RDMA_PROVIDERS:
        if provider in common and provider in mine.rdma and provider in theirs.rdma:
            return Choice(provider, f"{provider}: both sides have an active RDMA device ({_devices(mine, theirs)})")
    same_host = mine.host == theirs.host
    if same_host and "shm" in common:
        return Choice("shm", f"shm: {mine.name} and {theirs.name} share the host {mine.host}")
    if "tcp" in common:
        return Choice("tcp", f"tcp: {_why_tcp(mine, theirs)}")
    if "ucx" in common:
        return Choice("ucx", "ucx: both sides have libucp, and libfabric offers nothing that would connect them")
    raise ProviderUnavailable(
        f"{mine.name} and {theirs.name} have no provider in common that connects them: {mine.name} has "
        f"{_listed(mine.providers)}; {theirs.name} has {_listed(theirs.providers)}"
    )


def _why_tcp(mine: Reach, theirs: Reach) -> str:
    if mine.host == theirs.host:
        return f"{mine.name} and {theirs.name} share the host {mine.host}, but not both have shm"
    without = [side.name for side in (mine, theirs) if not side.rdma]
    if without:
        return f"on two hosts, without an active RDMA device at {' and '.join(without)}"
    return f"on two hosts whose RDMA devices differ ({_listed(mine.rdma)}; {_listed(theirs.rdma)})"


def _devices(mine: Reach, theirs: Reach) -> str:
    here, there = ", ".join(mine.nics), ", ".join(theirs.nics)
    return here if here == there else f"{mine.name}: {here}; {theirs.name}: {there}"


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
