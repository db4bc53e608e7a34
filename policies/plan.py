"""The transfer plan of one handoff as data: which bytes of which block go from which rank to which.

One entry per layer group and pair of ranks, whatever the number of layers, pages and segments: everything below a pair
is affine. An entry becomes one paged write per layer (`RankWrites.layer_writes` and `Segments.index`); segment k of
page p of a layer lies at

    region start + layer * layer stride + segment offset + (p * segments per block + k) * segment stride

so that a block in several segments is that many smaller blocks to the transport, and a whole block is the case of one.

Ranks are numbered within their replica: what a node of several replicas adds is the first rank of the replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.layout import BlockShape, HeadRange, Segments
from policies.sharding import LayerGroup, ParallelLayout, Shards, Share, check_bridge, pages_sent, shards, shares
from policies.sources import Assignment


@dataclass(frozen=True, slots=True)
class GroupPages:
    """A layer group's part in one handoff: what its elements are, and how many pages of it travel."""

    group: LayerGroup
    head_dim: int  # MLA: the latent with its rope part
    element_bytes: int
    pages: int

    def block(self, heads: int | None, parallel: ParallelLayout, page_size: int) -> BlockShape:
        return BlockShape(heads, self.head_dim, page_size, self.element_bytes, parallel.layout)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One handoff from a replica of `prefill` to a replica of `decode`; the first group is the target's."""

    groups: tuple[GroupPages, ...]
    prefill: ParallelLayout
    decode: ParallelLayout
    page_size: int
    tail: bool = False


@dataclass(frozen=True, slots=True)
class LayerWrites:
    """The numbers, in bytes, of a `transport.writes.PagedWrite`; regions, indices and immediate are the caller's."""

    block_bytes: int
    source_offset: int
    source_stride: int
    target_offset: int
    target_stride: int


@dataclass(frozen=True, slots=True)
class RankWrites:
    """What one source rank writes to one destination rank of one layer group.

    `source_segments` and `target_segments` are equal in number and length, and pair up in order.
    """

    group: int
    source: int
    destination: int
    heads: HeadRange | None  # numbered in the model; None: the whole latent
    layers: int
    pages: int
    source_segments: Segments
    target_segments: Segments

    @property
    def segments_per_block(self) -> int:
        return self.target_segments.count

    @property
    def segment_bytes(self) -> int:
        return self.target_segments.length_bytes

    @property
    def writes(self) -> int:
        return self.layers * self.pages * self.segments_per_block

    @property
    def bytes(self) -> int:
        return self.writes * self.segment_bytes

    def layer_writes(self, layer: int, source_layer_bytes: int, target_layer_bytes: int) -> LayerWrites:
        """One layer's writes; the arguments are the layer strides of the two regions.

        The paged write's index arrays are `source_segments.index(pages here)` and `target_segments.index(pages there)`,
        the same ones for every layer.
        """
        return LayerWrites(
            block_bytes=self.segment_bytes,
            source_offset=layer * source_layer_bytes + self.source_segments.offset_bytes,
            source_stride=self.source_segments.stride_bytes,
            target_offset=layer * target_layer_bytes + self.target_segments.offset_bytes,
            target_stride=self.target_segments.stride_bytes,
        )


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """`sources`: per layer group the draw that the entries follow. `entries`: by group, destination, source."""

    request: PlanRequest
    sources: tuple[Assignment, ...]
    entries: tuple[RankWrites, ...]

    @property
    def expected_count(self) -> int:
        return sum(entry.writes for entry in self.entries) + self.request.tail

    def writes_to(self, rank: int) -> int:
        """Immediates that are owed to one destination rank; the tail goes to the first."""
        writes = sum(entry.writes for entry in self.entries if entry.destination == rank)
        return writes + (1 if self.request.tail and rank == 0 else 0)

    def bytes_to(self, rank: int) -> int:
        """Without the tail, whose size the plan does not know."""
        return sum(entry.bytes for entry in self.entries if entry.destination == rank)


def prompt_pages(prompt_tokens: int, page_size: int, pages_present: int = 0) -> tuple[int, int]:
    """Pages that travel of (the target's cache, a drafter's cache).

    The prompt's last token is not prefilled, and a drafter's cache ends one token earlier still. Where the first number
    is 0 there is no handoff, hence no tail either.
    """
    return (
        pages_sent(prompt_tokens - 1, page_size, pages_present),
        pages_sent(max(0, prompt_tokens - 2), page_size, pages_present),
    )


def make_plan(request: PlanRequest, sources: Sequence[Assignment]) -> TransferPlan:
    """`sources` comes from `draw_sources`. Raises ShardingError."""
    check_bridge(request.prefill, request.decode, request.page_size, request.page_size)
    entries: list[RankWrites] = []
    for number, (part, assignment) in enumerate(zip(request.groups, sources, strict=True)):
        if part.pages:
            entries += _group_entries(request, number, assignment)
    return TransferPlan(request, tuple(sources), tuple(entries))


def _group_entries(request: PlanRequest, number: int, assignment: Assignment) -> list[RankWrites]:
    part = request.groups[number]
    here = shards(part.group, request.prefill.tp, " at prefill")
    there = shards(part.group, request.decode.tp, " at decode")
    assert len(assignment) == there.copies and all(0 <= chosen < here.copies for chosen in assignment)
    source_block = part.block(here.heads, request.prefill, request.page_size)
    target_block = part.block(there.heads, request.decode, request.page_size)
    entries = [
        RankWrites(
            group=number,
            source=here.rank(assignment[replica_set], share.source),
            destination=there.rank(replica_set, share.destination),
            heads=share.heads,
            layers=part.group.layers,
            pages=part.pages,
            source_segments=_segments(source_block, here, share.source, share),
            target_segments=_segments(target_block, there, share.destination, share),
        )
        for share in shares(here, there)
        for replica_set in range(there.copies)
    ]
    return sorted(entries, key=lambda entry: (entry.destination, entry.source))


def _segments(block: BlockShape, side: Shards, member: int, share: Share) -> Segments:
    if not share.cut or share.heads is None:
        return block.whole
    return block.segments(HeadRange(share.heads.first - side.heads_of(member).first, share.heads.count))
