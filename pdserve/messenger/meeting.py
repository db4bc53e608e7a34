"""What happens once per pair of incarnations: compare cards, choose the wire, open a link."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.errors import MeetingRefused
from pdserve.messenger.wire import NodeCard
from pdserve.types import Role
from transport.api import Memory, SourceRegion, Transport

_COMPARED = ("protocol", "fingerprint", "dtype", "page_size", "kv_layout", "head_dim", "groups", "parallel")


def refusal(prefill: NodeCard, decode: NodeCard) -> str | None:
    """Why these two cannot work together: the field and both values; None if they can."""
    if prefill.role is not Role.PREFILL or decode.role is not Role.DECODE:
        return f"roles do not pair: {prefill.node_id} is {prefill.role}, {decode.node_id} is {decode.role}"
    for field in _COMPARED:
        ours, theirs = getattr(prefill, field), getattr(decode, field)
        if ours != theirs:
            here, there = f"{prefill.node_id} ({prefill.model})", f"{decode.node_id} ({decode.model})"
            return f"{field} differs: {ours} at {here}, {theirs} at {there}"
    return None


def choose_provider(configured: str, mine: NodeCard, theirs: NodeCard) -> str:
    """The wire between two nodes: the configured one, else `shm` on one host, else `tcp`.

    Raises MeetingRefused when the two have no such provider in common.
    """
    wanted = configured
    if configured == "auto":
        wanted = "shm" if mine.host == theirs.host and "shm" in mine.providers and "shm" in theirs.providers else "tcp"
    for card in (mine, theirs):
        if wanted not in card.providers:
            raise MeetingRefused(
                f"provider {wanted!r} is not to be had at {card.node_id} (it has {', '.join(card.providers) or 'none'})"
            )
    return wanted


@dataclass(frozen=True, slots=True)
class OpenTransport:
    """A transport, and the KV memory registered with it as a source."""

    transport: Transport
    source: SourceRegion


class Transports:
    """This node's transports, opened at first use, one per provider. Thread-safe."""

    def __init__(self, open_transport: Callable[[str], Transport], memory: Memory) -> None:
        self._open_transport = open_transport
        self.memory = memory
        self._open: dict[str, OpenTransport] = {}
        self._lock = threading.Lock()

    def get(self, provider: str) -> OpenTransport:
        with self._lock:
            if provider not in self._open:
                transport = self._open_transport(provider)
                self._open[provider] = OpenTransport(transport, transport.register(self.memory))
            return self._open[provider]

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
