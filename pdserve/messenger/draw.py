"""Which rank writes what to which, and which of several copies of the cache is read: drawn for every request anew."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from pdserve.messenger.destinations import Destination
from pdserve.messenger.wire import NodeCard
from policies.layout import PageGeometry
from policies.plan import GroupPages, PlanRequest, TransferPlan, make_plan
from policies.sources import Rails, SourcePolicy, draw_sources


@dataclass(frozen=True, slots=True)
class Draw:
    """Of one prefill replica. `geometry`: of the memory of its ranks."""

    card: NodeCard
    geometry: PageGeometry
    policy: SourcePolicy
    random: Random

    def plan(self, peer: Destination, pages: int) -> TransferPlan:
        """For a handoff of so many pages."""
        card, there = self.card, peer.request.card.parallel
        groups = tuple(
            GroupPages(group, self.geometry.head_dim, self.geometry.element_bytes, pages) for group in card.groups
        )
        rails = self._rails(peer) if self.policy is SourcePolicy.RAIL else None
        drawn = draw_sources(card.groups, (card.parallel.tp, there.tp), self.random, rails)
        return make_plan(PlanRequest(groups, card.parallel, there, card.page_size), drawn)

    def _rails(self, peer: Destination) -> tuple[Rails, Rails]:
        return (
            rails_of(self.card, peer.link.address.rails),
            rails_of(peer.request.card, peer.request.address.rails),
        )


def rails_of(card: NodeCard, link: tuple[int, ...]) -> Rails:
    """Per rank, by what its card says; else every rank has all NICs of the link."""
    assert not card.rails or len(card.rails) == card.parallel.tp
    return card.rails or (frozenset(link),) * card.parallel.tp
