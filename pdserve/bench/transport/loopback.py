"""Blocks a second through the loopback transport, in this process: what the machinery above a provider can do."""

from __future__ import annotations

import time

import numpy as np

from pdserve.bench.transport.pair import Round
from transport.api import Imm, Memory, PagedWrite
from transport.loopback import LoopbackTransport

BLOCK_BYTES = 64
PLACES = 4096
_IMM = Imm(1)


def loopback_rounds(blocks: int, rounds: int) -> list[Round]:
    """Each posts `blocks` blocks in random order and ends when all have landed and been counted."""
    rng = np.random.default_rng(0)
    source, target = rng.integers(0, 256, (PLACES, BLOCK_BYTES), np.uint8), np.zeros((PLACES, BLOCK_BYTES), np.uint8)
    # Permutations side by side: block i of every one of them goes from the same place to the same place.
    turns = -(-blocks // PLACES)
    pairs = np.stack([rng.permutation(PLACES), rng.permutation(PLACES)])
    index = np.tile(pairs, turns)[:, :blocks].astype(np.int64)
    with LoopbackTransport() as sender, LoopbackTransport() as receiver:
        here, there = sender.open_link(), receiver.open_link()
        exposed = there.expose(Memory(target.ctypes.data, target.nbytes)).descriptor
        here.connect(there.address, window=sender.max_window)
        region = sender.register(Memory(source.ctypes.data, source.nbytes))
        receiver.immediates.arm(_IMM, 1 << 40, lambda _: None)
        write = PagedWrite(region, exposed, BLOCK_BYTES, 0, BLOCK_BYTES, index[0], 0, BLOCK_BYTES, index[1], _IMM)
        taken = []
        for number in range(1, rounds + 2):
            begun, cpu = time.perf_counter(), time.process_time()
            transfer = here.write_paged(write)
            transfer.wait()
            while receiver.immediates.received(_IMM) < number * blocks:
                time.sleep(1e-4)
            taken.append(Round(time.perf_counter() - begun, (time.process_time() - cpu, 0.0)))
            if transfer.error is not None:
                raise transfer.error
        if blocks >= PLACES and not (target[pairs[1]] == source[pairs[0]]).all():
            raise RuntimeError("the loopback transport moved wrong bytes")
    return taken[1:]
