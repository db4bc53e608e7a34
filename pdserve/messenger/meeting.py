"""What happens once per pair of incarnations: compare cards, choose the wire, open a link."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.errors import MeetingRefused
from pdserve.messenger.wire import NodeCard
from pdserve.types import Role
from policies.sharding import ShardingError, check_bridge, shards
from transport.api import Memory, SourceRegion, Transport
from transport.choice import Choice, choose
from transport.errors import TransportError

_log = logging.getLogger(__name__)

_COMPARED = ("protocol", "fingerprint", "dtype", "page_size", "kv_layout", "head_dim", "groups")


def refusal(prefill: NodeCard, decode: NodeCard) -> str | None:
    """Why these two cannot work together: the field and both values; None if they can."""
    if prefill.role is not Role.PREFILL or decode.role is not Role.DECODE:
        return f"roles do not pair: {prefill.node_id} is {prefill.role}, {decode.node_id} is {decode.role}"
    for field in _COMPARED:
        ours, theirs = getattr(prefill, field), getattr(decode, field)
        if ours != theirs:
            here, there = f"{prefill.node_id} ({prefill.model})", f"{decode.node_id} ({decode.model})"
            return f"{field} differs: {ours} at {here}, {theirs} at {there}"
    try:
        check_bridge(prefill.parallel, decode.parallel, prefill.page_size, decode.page_size)
        for group in prefill.groups:
            shards(group, prefill.parallel.tp, f" at {prefill.node_id}")
            shards(group, decode.parallel.tp, f" at {decode.node_id}")
    except ShardingError as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True)
class Replica:
    """Which of its node's engine replicas a messenger works for; they share the node's transports."""

    number: int = 0
    count: int = 1

    def ranks(self, tp: int) -> slice:
        """Its ranks among the node's."""
        return slice(self.number * tp, (self.number + 1) * tp)


ALONE = Replica()


@dataclass(frozen=True, slots=True)
class WireWish:
    """What the settings say about the wire."""

    provider: str = "auto"
    allow_tcp: bool = False  # also between GPUs

    def choose(self, mine: NodeCard, theirs: NodeCard) -> Choice:
        """The same on both sides. Raises MeetingRefused, which names the side that lacks it."""
        try:
            return choose(self.provider, mine.reach, theirs.reach, allow_tcp=self.allow_tcp)
        except TransportError as error:
            raise MeetingRefused(f"{error}. `pdserve doctor` says on each node what is missing there") from error


@dataclass(frozen=True, slots=True)
class OpenTransport:
    """A transport, why it was chosen at first, and the ranks' KV memories registered with it as sources."""

    transport: Transport
    reason: str
    sources: tuple[SourceRegion, ...]


class Transports:
    """This node's transports, opened at first use, one per provider, for the memories of all ranks. Thread-safe."""

    def __init__(self, open_transport: Callable[[str], Transport], *memories: Memory) -> None:
        self._open_transport = open_transport
        self.memories = memories
        self._open: dict[str, OpenTransport] = {}
        self._lock = threading.Lock()

    def get(self, choice: Choice) -> OpenTransport:
        """Raises what opening it raises."""
        with self._lock:
            if choice.provider not in self._open:
                transport = self._open_transport(choice.provider)
                try:
                    sources = tuple(transport.register(memory) for memory in self.memories)
                except BaseException:
                    transport.close()
                    raise
                _log.info("wire: %s; chosen because %s", transport.description, choice.reason)
                self._open[choice.provider] = OpenTransport(transport, choice.reason, sources)
            return self._open[choice.provider]

    def opened(self, provider: str) -> OpenTransport | None:
        with self._lock:
            return self._open.get(provider)

    def all(self) -> list[OpenTransport]:
        with self._lock:
            return list(self._open.values())

    def fault(self) -> Exception | None:
        """What has ended the worker of one of them: nothing in this process can be transferred over it any more."""
        with self._lock:
            return next((entry.transport.error for entry in self._open.values() if entry.transport.error), None)

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters of each open transport, by provider."""
        with self._lock:
            return {provider: entry.transport.stats() for provider, entry in self._open.items()}

    def close(self) -> None:
        with self._lock:
            for entry in self._open.values():
                entry.transport.close()
            self._open.clear()
