"""How ranks share a cache, which rank gives what to whom, and how many writes a handoff takes.

The count is derivable by the decode side before the prefill side has chosen anything: it depends on the layouts, the
prompt and the pages already there, never on source pages, source replica sets or NICs. `plan.py` says which bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from policies.layout import HeadRange, KvLayout


class ShardingError(ValueError):
    """Two layouts cannot be bridged; the message names the field and both values."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one geometry. `kv_heads` is the whole model's; None means MLA: one latent that every rank copies."""

    layers: int
    kv_heads: int | None


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """A node's engine replicas: `dp` of them, each of `tp` ranks that share the cache of the replica's requests.

    Replica d has the node's ranks `d * tp` to `(d + 1) * tp - 1`. How experts are shared does not touch the cache.
    """

    tp: int = 1
    layout: KvLayout = KvLayout.HND
    dp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.dp


@dataclass(frozen=True, slots=True)
class Shards:
    """One layer group's cache on the ranks of one replica.

    Each run of `copies` neighbouring ranks holds the same heads, so replica set s, a smallest group of ranks that holds
    the whole cache, is the ranks `s, s + copies, s + 2 * copies, …`: its members in the order of their heads.
    """

    members: int  # ranks of one replica set
    copies: int  # replica sets
    heads: int | None  # KV heads that one rank holds; None: the whole latent

    def rank(self, replica_set: int, member: int) -> int:
        """Its number in the replica."""
        return member * self.copies + replica_set

    def heads_of(self, member: int) -> HeadRange:
        assert self.heads is not None
        return HeadRange(member * self.heads, self.heads)


@dataclass(frozen=True, slots=True)
class Share:
    """What a member of a source replica set has in common with a member of a destination replica set."""

    source: int
    destination: int
    heads: HeadRange | None  # numbered in the model; None: the whole latent
    cut: bool  # one side holds heads that the other does not: the block does not travel as a whole


def heads_per_rank(kv_heads: int, tp: int, where: str = "") -> int:
    """KV heads that one of `tp` ranks holds. Raises ShardingError unless one number divides the other."""
    if kv_heads % tp == 0:
        return kv_heads // tp
    if tp % kv_heads == 0:
        return 1
    raise ShardingError(
        f"{kv_heads} KV heads cannot be shared by {tp} ranks{where}: one number must be a multiple of the other"
    )


def shards(group: LayerGroup, tp: int, where: str = "") -> Shards:
    """Raises ShardingError; `where` goes into its message."""
    if group.kv_heads is None:
        return Shards(members=1, copies=tp, heads=None)
    heads = heads_per_rank(group.kv_heads, tp, where)
    members = group.kv_heads // heads
    return Shards(members, tp // members, heads)


def shares(source: Shards, destination: Shards) -> tuple[Share, ...]:
    """What each member of a destination replica set gets from each member of its source replica set.

    Ordered by destination, then source; together they are the whole cache, each head once.
    """
    if destination.heads is None:
        return (Share(0, 0, None, cut=False),)
    found = []
    for j in range(destination.members):
        want = destination.heads_of(j)
        for i in range(source.members):
            have = source.heads_of(i)
            if common := want.overlap(have):
                found.append(Share(i, j, common, cut=not common == want == have))
    return tuple(found)


def check_bridge(prefill: ParallelLayout, decode: ParallelLayout, page_size: int, decode_page_size: int) -> None:
    """Raises ShardingError where pages here are no pages there, whatever the ranks."""
    if page_size != decode_page_size:
        raise ShardingError(
            f"page sizes differ: {page_size} tokens at prefill, {decode_page_size} at decode; set both the same"
        )
    if prefill.layout is not decode.layout:
        raise ShardingError(
            f"KV layouts differ: {prefill.layout} at prefill, {decode.layout} at decode; set both the same"
        )
    for name in ("tp", "dp"):
        for where, side in (("prefill", prefill), ("decode", decode)):
            if getattr(side, name) < 1:
                raise ShardingError(f"{name} at {where} is {getattr(side, name)}; it must be at least 1")


def segments_per_block(share: Share, layout: KvLayout, page_size: int) -> int:
    """Contiguous byte ranges, hence writes, that one block of a share takes."""
    if not share.cut:
        return 1
    return 2 if layout is KvLayout.HND else 2 * page_size


def pages_sent(tokens: int, page_size: int, pages_present: int = 0) -> int:
    """Pages that travel for `tokens` cached tokens, of which the first `pages_present` pages are already there."""
    return max(0, -(-tokens // page_size) - pages_present)


def writes_per_rank(
    groups: Iterable[tuple[LayerGroup, int]], prefill: ParallelLayout, decode: ParallelLayout, page_size: int
) -> tuple[int, ...]:
    """Writes into each rank of a decode replica, the tail apart; `groups`: a layer group, and its pages that travel.

    Raises ShardingError.
    """
    check_bridge(prefill, decode, page_size, page_size)
    writes = [0] * decode.tp
    for group, pages in groups:
        source = shards(group, prefill.tp, " at prefill")
        destination = shards(group, decode.tp, " at decode")
        for share in shares(source, destination):
            count = group.layers * pages * segments_per_block(share, decode.layout, page_size)
            for replica_set in range(destination.copies):
                writes[destination.rank(replica_set, share.destination)] += count
    return tuple(writes)


def expected_count(
    groups: Iterable[tuple[LayerGroup, int]],
    prefill: ParallelLayout,
    decode: ParallelLayout,
    page_size: int,
    *,
    tail: bool = False,
) -> int:
    """Immediates of one handoff, over all ranks of the replica; the tail is one write more. Raises ShardingError."""
    return sum(writes_per_rank(groups, prefill, decode, page_size)) + (1 if tail else 0)
