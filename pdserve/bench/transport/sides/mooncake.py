"""Mooncake's transfer engine over its TCP transport. It has no completion at the receiver."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

from pdserve.bench.transport.sides.side import Side

BATCH = 1024
"""It refuses larger ones."""
PACKAGE = "mooncake-transfer-engine-non-cuda"


class MooncakeSide(Side):
    def start(self) -> dict[str, Any]:
        self.engine = importlib.import_module("mooncake.engine").TransferEngine()
        if self.engine.initialize(self.spec.host, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake does not initialize")
        self.engine.register_memory(self.address, self.memory.nbytes)
        return {
            "about": f"Mooncake {version(PACKAGE)}, TCP transport",
            "name": f"{self.spec.host}:{self.engine.get_rpc_port()}",
            "memory": self.address,
        }

    def meet(self, other: dict[str, Any]) -> None:
        self.peer, self.peer_memory = other["name"], other["memory"]

    def prepare(self, kind: Any, block_bytes: int, blocks: int, number: int) -> None:
        super().prepare(kind, block_bytes, blocks, number)
        if self.spec.sends:
            self.here = (self.address + block_bytes * self.source_index).tolist()
            self.there = (self.peer_memory + block_bytes * self.target_index).tolist()

    def send(self) -> None:
        for first in range(0, len(self.here), BATCH):
            here, there = self.here[first : first + BATCH], self.there[first : first + BATCH]
            sizes = [self.load.block_bytes] * len(here)
            if self.engine.batch_transfer_sync_write(self.peer, here, there, sizes) < 0:
                raise RuntimeError("Mooncake transfer failed")

    def receive(self) -> None:
        return
