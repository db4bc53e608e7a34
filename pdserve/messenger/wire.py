"""The messages of a handoff, and what two nodes tell each other when they meet.

Every message names both incarnations; one from or for another incarnation is refused. Meetings go by discovery's
channel, pickled like everything there; handoff messages go by the link that a meeting has made, as bytes (`codec.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pdserve.types import Incarnation, NodeId, PageIndex, Role
from policies.layout import KvLayout
from policies.sharding import LayerGroup, ParallelLayout
from transport.api import Imm, LinkAddress, RegionDescriptor
from transport.choice import Reach

PROTOCOL_VERSION = 3

LAYER_ROWS = 4096
"""Most rows of layers that a `Done` has, and most chunks."""


class HandoffId(NamedTuple):
    """Unique for ever: the decode node's incarnation and its running number."""

    decode: Incarnation
    number: int

    def __str__(self) -> str:
        return f"{self.decode:016x}/{self.number}"


@dataclass(frozen=True, slots=True)
class NodeCard:
    """What a node is, as far as its peers must know."""

    node_id: NodeId
    incarnation: Incarnation
    role: Role
    host: str  # equal for processes that share memory and pids
    pid: int
    providers: tuple[str, ...]  # what its transports can open, best first
    protocol: int
    model: str
    fingerprint: str
    dtype: str
    page_size: int
    kv_layout: KvLayout
    head_dim: int
    groups: tuple[LayerGroup, ...]
    parallel: ParallelLayout
    max_model_len: int
    rdma: tuple[str, ...] = ()  # those of `providers` that have an active RDMA device …
    nics: tuple[str, ...] = ()  # … and these devices
    gpus: bool = False  # its KV memory is a GPU's
    rails: tuple[frozenset[int], ...] = ()  # per rank those of the NICs nearest to it; empty: all ranks use all NICs

    @property
    def reach(self) -> Reach:
        """What the choice of a wire goes by."""
        return Reach(self.node_id, self.host, self.providers, self.rdma, self.nics, self.gpus)

    @property
    def compatibility(self) -> str:
        """Equal on nodes that can work together; what `policies.routing` compares."""
        parts = (self.protocol, self.fingerprint, self.dtype, self.page_size, self.kv_layout, self.max_model_len)
        return "|".join(str(part) for part in parts)


@dataclass(frozen=True, slots=True)
class RegionGrant:
    """One rank's region, exposed to one peer: the descriptor and where its blocks lie."""

    descriptor: RegionDescriptor
    layer_stride_bytes: int
    block_bytes: int
    pages: int


@dataclass(frozen=True, slots=True)
class MeetRequest:
    """D → P: who I am, where to write, and how much may be outstanding.

    `number` comes from the same sequence as handoff numbers: handoffs and meetings below it are void, because D revoked
    whatever it had given for them. So a message that was delayed across a new meeting can never be carried out.
    """

    card: NodeCard
    number: int
    address: LinkAddress
    regions: tuple[RegionGrant, ...]
    window: int


@dataclass(frozen=True, slots=True)
class MeetReply:
    """P → D: who I am, where my end of the link is, and which of my earlier links towards you are closed.

    Of every meeting up to number `closed_through` P has closed its end before it answered, so that nothing of it is in
    flight: memory that D could not make safe by itself (`Transport.revokes`) is safe by this. 0: of none.
    """

    card: NodeCard
    address: LinkAddress
    closed_through: int = 0


@dataclass(frozen=True, slots=True)
class MeetRefusal:
    """P → D: the field on which we differ, and both values."""

    reason: str


@dataclass(frozen=True, slots=True)
class HandoffRequest:
    """D → P: compute this prompt without its last token and write its pages here."""

    id: HandoffId
    sender: NodeId
    source: Incarnation  # D
    target: Incarnation  # P
    prompt: tuple[int, ...]  # all n tokens
    present_pages: int  # whole pages that D has already
    pages: tuple[PageIndex, ...]  # destination pages of the missing ones, in prompt order
    imm: Imm
    timeout_s: float  # D's patience, from the arrival of this message on


@dataclass(frozen=True, slots=True)
class Accept:
    id: HandoffId
    source: Incarnation  # P
    queue_position: int


@dataclass(frozen=True, slots=True)
class Reject:
    """P → D: not done, and nothing of it was or will be posted."""

    id: HandoffId
    source: Incarnation
    reason: str
    retryable: bool  # another P may do it


@dataclass(frozen=True, slots=True)
class Cancel:
    id: HandoffId
    sender: NodeId
    source: Incarnation  # D
    target: Incarnation  # P


@dataclass(frozen=True, slots=True)
class Quiesced:
    """P → D: `posted` writes in all, and none will follow."""

    id: HandoffId
    source: Incarnation
    posted: int
    reason: str


@dataclass(frozen=True, slots=True)
class LayerTiming:
    """One layer of one chunk, over all pairs of ranks. Times are `time.monotonic()` seconds of P's host."""

    chunk: int
    layer: int
    computed_at: float
    posted_at: float  # the first write of it
    completed_at: float  # the last one
    writes: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PrefillTimings:
    """How P spent its time on a handoff. Times are `time.monotonic()` seconds of P's host."""

    received_at: float
    started_at: float  # its first chunk began
    computed_at: float  # its last forward pass ended
    drained_at: float  # its last write had completed locally
    chunks: tuple[tuple[int, int], ...]  # token ranges; of a very long prompt several chunks count as one
    layers: tuple[LayerTiming, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """P → D: all writes completed locally. Bookkeeping only: it never makes a request ready."""

    id: HandoffId
    source: Incarnation
    posted: int
    timings: PrefillTimings | None


@dataclass(frozen=True, slots=True)
class NotMet:
    """P → D: you meant my predecessor, or I do not know you (any more). Revoke what you gave, and meet me again.

    `id` is the handoff that this answers or, when P has closed the link, has the meeting's number. Heeded only while
    that handoff is under way or that meeting the last one: a late one must not end what has been renewed since.
    """

    id: HandoffId
    source: Incarnation  # who lives here now
    target: Incarnation  # who was meant
    reason: str


ToPrefill = HandoffRequest | Cancel
ToDecode = Accept | Reject | Quiesced | Done | NotMet


class ToPrefillChannel(Protocol):
    """From a decode node to one prefill node without a link: meetings, and what the link does not take.

    Nothing here blocks; messages may be lost, and may overtake those that go by the link.
    """

    def meet(self, request: MeetRequest, on_reply: MeetCallback) -> None: ...

    def send(self, message: ToPrefill) -> None: ...


class ToDecodeChannel(Protocol):
    """From a prefill node to one decode node without a link. Nothing here blocks; messages may be lost."""

    def send(self, message: ToDecode) -> None: ...


class MeetCallback(Protocol):
    """Called once, on any thread, with the answer or with the error that took its place."""

    def __call__(self, reply: MeetReply | MeetRefusal | Exception) -> None: ...
