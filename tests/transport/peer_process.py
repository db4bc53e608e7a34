"""The other process of the two-process tests: answers pickled (command, arguments) from stdin on stdout."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from transport.api import Imm, LinkAddress, Memory, PagedWrite, RegionDescriptor
from transport.engine import TransferEngine


class Peer:
    def open(self, provider: str) -> LinkAddress:
        self.engine = TransferEngine(provider, stall_timeout_s=2.0)
        self.link = self.engine.open_link()
        return self.link.address

    def expose(self, length_bytes: int) -> RegionDescriptor:
        self.memory = np.zeros(length_bytes, np.uint8)
        return self.link.expose(Memory(int(self.memory.ctypes.data), length_bytes)).descriptor

    def stream(self, address: LinkAddress, target: RegionDescriptor, block: int, blocks: int, imm: Imm) -> None:
        """Writes all blocks over and over, each round with other bytes, until an error or `stop`."""
        self.source = np.zeros((blocks, block), np.uint8)
        region = self.engine.register(Memory(int(self.source.ctypes.data), self.source.nbytes))
        self.link.connect(address, window=32, name="receiver")
        order = np.arange(blocks)
        self.stopping = False
        self.transfers: list[Any] = []

        def run() -> None:
            while not self.stopping:
                self.source[:] = len(self.transfers) % 250 + 1
                transfer = self.link.write_paged(
                    PagedWrite(region, target, block, 0, block, order, 0, block, order, imm)
                )
                self.transfers.append(transfer)
                while not transfer.wait(0.05) and not self.stopping:
                    pass
                if transfer.error is not None:
                    return

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def stop(self) -> tuple[list[tuple[int, int, bool]], str]:
        """Closes the link; (posted, completed, done) of each transfer, and the type of the last one's error."""
        self.stopping = True
        self.link.close()
        self.thread.join()
        last = self.transfers[-1].error
        return [(t.posted, t.completed, t.done) for t in self.transfers], type(last).__name__


def main() -> None:
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    peer = Peer()
    while True:
        try:
            command, arguments = pickle.load(stdin)
        except EOFError:
            break
        try:
            answer = getattr(peer, command)(*arguments)
        except Exception as error:
            answer = error
        pickle.dump(answer, stdout)
        stdout.flush()
    if hasattr(peer, "engine"):
        peer.engine.close()


if __name__ == "__main__":
    main()
