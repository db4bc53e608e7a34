"""How ranks share a cache, who writes to whom, and how many writes a handoff takes.

The count is derivable by the decode side before the prefill side has chosen anything: it depends on the layouts, the
prompt and the pages already there, never on source pages, source replica sets or NICs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from policies.layout import KvLayout


class ShardingError(ValueError):
    """Two layouts cannot be bridged; the message names the numbers at fault."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one geometry. `kv_heads` is the whole model's; None means MLA: one latent that every rank copies."""

    layers: int
    kv_heads: int | None


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """One engine replica: `tp` ranks that share each request's cache."""

    tp: int = 1
    layout: KvLayout = KvLayout.HND


def heads_per_rank(kv_heads: int, tp: int) -> int:
    """KV heads that one of `tp` ranks holds. Raises ShardingError unless one number divides the other."""
    if kv_heads % tp == 0:
        return kv_heads // tp
    if tp % kv_heads == 0:
        return 1
    raise ShardingError(
        f"{kv_heads} KV heads cannot be shared by {tp} ranks: one number must be a multiple of the other"
    )


def sources_per_destination(group: LayerGroup, prefill: ParallelLayout, decode: ParallelLayout) -> int:
    """Source ranks that one destination rank receives from."""
    if group.kv_heads is None:
        return 1
    have = heads_per_rank(group.kv_heads, prefill.tp)
    need = heads_per_rank(group.kv_heads, decode.tp)
    return max(1, need // have)


def segments_per_block(group: LayerGroup, prefill: ParallelLayout, decode: ParallelLayout, page_size: int) -> int:
    """Contiguous byte ranges that one block between one pair of ranks breaks into."""
    if prefill.layout is not decode.layout:
        raise ShardingError(f"KV layouts differ: {prefill.layout} at prefill, {decode.layout} at decode")
    if group.kv_heads is None:
        return 1
    if heads_per_rank(group.kv_heads, prefill.tp) == heads_per_rank(group.kv_heads, decode.tp):
        return 1
    return 2 if decode.layout is KvLayout.HND else 2 * page_size


def pages_sent(tokens: int, page_size: int, pages_present: int = 0) -> int:
    """Pages that travel for `tokens` cached tokens, of which the first `pages_present` pages are already there."""
    return max(0, -(-tokens // page_size) - pages_present)


def writes_per_destination_rank(
    groups: Iterable[tuple[LayerGroup, int]], prefill: ParallelLayout, decode: ParallelLayout, page_size: int
) -> int:
    """Writes into one rank of the replica; `groups` pairs each layer group with the pages of it that travel."""
    return sum(
        sources_per_destination(group, prefill, decode)
        * group.layers
        * pages
        * segments_per_block(group, prefill, decode, page_size)
        for group, pages in groups
    )


def expected_count(
    groups: Iterable[tuple[LayerGroup, int]],
    prefill: ParallelLayout,
    decode: ParallelLayout,
    page_size: int,
    *,
    tail: bool = False,
) -> int:
    """Immediates of one handoff, over all ranks of the replica; the tail is one write more."""
    return decode.tp * writes_per_destination_rank(groups, prefill, decode, page_size) + (1 if tail else 0)
