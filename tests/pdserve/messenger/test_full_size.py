"""One handoff of each reference deployment at full size, without models or caches: real writes, exact counts.

Every write reads the same source block and lands in the same place, so that it takes no memory to speak of.
"""

from __future__ import annotations

import threading
from random import Random

import numpy as np
import pytest

from policies.plan import GroupPages, PlanRequest, TransferPlan, make_plan, prompt_pages
from policies.sharding import LayerGroup, ParallelLayout
from policies.sources import draw_sources
from transport.api import Link, Memory, PagedWrite, RegionDescriptor, SourceRegion, Transfer, Transport, make_imm
from transport.open import open_transport

PAGE, PROMPT = 64, 4097
QWEN = GroupPages(LayerGroup(62, 8), 128, 2, 0)
R1 = GroupPages(LayerGroup(61, None), 576, 2, 0)
# the model, prefill, decode, writes per destination rank, bytes of one write
CASES = {
    "deepseek-r1 tp8 to dp8": (R1, ParallelLayout(8), ParallelLayout(1, dp=8), (3_904,), 72 << 10),
    "qwen3-coder-480b tp8 to tp8": (QWEN, ParallelLayout(8), ParallelLayout(8), (3_968,) * 8, 32 << 10),
}
PATIENCE_S = 120.0


def plan_of(part: GroupPages, prefill: ParallelLayout, decode: ParallelLayout) -> TransferPlan:
    pages, _ = prompt_pages(PROMPT, PAGE)
    groups = (GroupPages(part.group, part.head_dim, part.element_bytes, pages),)
    return make_plan(
        PlanRequest(groups, prefill, decode, PAGE), draw_sources([part.group], (prefill.tp, decode.tp), Random(7))
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_handoff_of_4097_tokens_counts_exactly(name: str) -> None:
    part, prefill, decode, per_rank, write_bytes = CASES[name]
    plan = plan_of(part, prefill, decode)
    assert [plan.writes_to(rank) for rank in range(decode.tp)] == list(per_rank)
    assert {entry.segment_bytes for entry in plan.entries} == {write_bytes}
    source, target = np.full(write_bytes, 7, np.uint8), np.zeros((decode.tp, write_bytes), np.uint8)
    receiver, sender = open_transport("tcp"), open_transport("tcp")
    try:
        incoming, outgoing = receiver.open_link(), sender.open_link()
        grants = [incoming.expose(Memory(block.ctypes.data, block.nbytes)).descriptor for block in target]
        region = sender.register(Memory(source.ctypes.data, source.nbytes))
        incoming.connect(outgoing.address, window=0)
        outgoing.connect(incoming.address, window=256)
        _carry_out(plan, (receiver, outgoing), region, grants)
        counters = receiver.immediates
        assert counters.late == counters.overflow == 0 and (target == 7).all()
    finally:
        sender.close()
        receiver.close()


def _carry_out(
    plan: TransferPlan, ends: tuple[Transport, Link], region: SourceRegion, grants: list[RegionDescriptor]
) -> None:
    (receiver, link), full, imm = ends, threading.Event(), make_imm(3, 1)
    receiver.immediates.arm(imm, plan.expected_count, lambda _: full.set())
    transfers: list[Transfer] = []
    for layer in range(plan.entries[0].layers):
        for entry in plan.entries:
            index = entry.target_segments.index(np.arange(entry.pages))
            numbers = entry.layer_writes(layer, 0, 0)
            write = PagedWrite(
                region, grants[entry.destination], numbers.block_bytes, 0, 0, index, 0, 0, index, imm
            )  # fmt: skip
            transfers.append(link.write_paged(write))
    assert full.wait(PATIENCE_S), f"{receiver.immediates.received(imm)} of {plan.expected_count}"
    assert all(transfer.wait(PATIENCE_S) and transfer.error is None for transfer in transfers)
    assert sum(transfer.posted for transfer in transfers) == plan.expected_count
    assert receiver.immediates.disarm(imm) == plan.expected_count
