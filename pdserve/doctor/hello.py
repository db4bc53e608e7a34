"""What two doctors tell each other first, and the provider that follows from it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

from pdserve import __version__
from pdserve.doctor.checks.libraries import provider_for
from pdserve.doctor.conversation import SAME_VERSION, PeerFailed
from pdserve.errors import ConfigError
from pdserve.messenger.liveness import host_identity
from transport.choice import AUTO, Choice, Reach, choose
from transport.dll import load_libfabric
from transport.errors import LibraryMissing, TransportError
from transport.fabric.info import available
from transport.topology import fabric_nics, read_topology
from transport.ucx.dll import load_libucp

PROTOCOL = 1
LOOK = "`pdserve doctor` on both sides says what is missing"


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """`provider`: one by name, or `auto`; `library`: the path of libfabric."""

    provider: str = AUTO
    library: str | None = None


@dataclass(frozen=True, slots=True)
class Hello:
    """What each side says first."""

    protocol: int
    version: str
    provider: str
    reach: Reach

    def fields(self) -> dict[str, Any]:
        reach = self.reach
        return {
            "protocol": self.protocol, "version": self.version, "provider": self.provider, "name": reach.name,
            "host": reach.host, "providers": reach.providers, "rdma": reach.rdma, "nics": reach.nics,
        }  # fmt: skip

    @classmethod
    def of(cls, message: dict[str, Any]) -> Hello:
        """Raises PeerFailed for another protocol; whatever else is said is taken as text."""
        protocol = message.get("protocol")
        if protocol != PROTOCOL:
            raise PeerFailed(
                f"the other side (pdserve {message.get('version')}) speaks protocol {protocol}, this one {PROTOCOL}",
                SAME_VERSION,
            )
        name, host = str(message.get("name")), str(message.get("host"))
        providers, rdma, nics = (tuple(map(str, message.get(key) or ())) for key in ("providers", "rdma", "nics"))
        reach = Reach(name, host, providers, rdma, nics)
        return cls(PROTOCOL, str(message.get("version")), str(message.get("provider")), reach)


def own_hello(options: PeerOptions) -> Hello:
    """Raises LibraryMissing; ConfigError for a provider that does not open here."""
    providers = available(load_libfabric(options.library))
    try:
        load_libucp()
        providers += ("ucx",)
    except LibraryMissing:
        pass  # only the fallback is missing
    if options.provider not in (AUTO, *providers):
        raise ConfigError(f"--provider: {options.provider!r} does not open here; allowed: auto, {', '.join(providers)}")
    nics = fabric_nics(read_topology())
    rdma = tuple(name for name in {provider_for(nic) for nic in nics} if name in providers)
    names = tuple(nic.name for nic in nics)
    reach = Reach(socket.gethostname(), host_identity(), providers, rdma, names)
    return Hello(PROTOCOL, __version__, options.provider, reach)


def agree(mine: Hello, theirs: Hello) -> Choice:
    """The provider, the same on both sides. Raises PeerFailed."""
    asked = {mine.provider, theirs.provider} - {AUTO}
    if len(asked) == 2:
        raise PeerFailed(
            f"this side was started with provider {mine.provider}, the other one with {theirs.provider}",
            "give both the same --provider, or none",
        )
    try:
        return choose(asked.pop() if asked else AUTO, mine.reach, theirs.reach, allow_tcp=True)
    except TransportError as error:
        raise PeerFailed(str(error), LOOK) from error
