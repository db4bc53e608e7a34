"""The other process of the two-process tests: answers pickled (command, arguments) from stdin on stdout."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from transport.api import Imm, LinkAddress, Memory, PagedWrite, RegionDescriptor, SingleWrite
from transport.open import open_transport


class Peer:
    """Handles are indices into `kept`."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.fired_handles: set[int] = set()
        self.inboxes: dict[int, list[bytes]] = {}

    def open(self, provider: str, options: Any = None) -> None:
        """`options`: those of `open_transport`; or the `calls` alone."""
        chosen = options if isinstance(options, dict) else {"calls": options or "auto"}
        self.engine = open_transport(provider, **{"stall_timeout_s": 2.0, **chosen})

    def shut(self) -> None:
        self.stopping = True
        if hasattr(self, "engine"):
            self.engine.close()
        self.kept.clear()
        self.fired_handles.clear()
        self.inboxes.clear()

    def keep(self, thing: Any) -> int:
        self.kept.append(thing)
        return len(self.kept) - 1

    def open_link(self) -> tuple[int, LinkAddress]:
        messages: list[bytes] = []
        self.link = self.engine.open_link(messages.append)
        handle = self.keep(self.link)
        self.inboxes[handle] = messages
        return handle, self.link.address

    def messages(self, link: int) -> list[bytes]:
        """Those that have come since it was asked the last time."""
        inbox = self.inboxes[link]
        return [inbox.pop(0) for _ in range(len(inbox))]

    def of_link(self, link: int, name: str) -> Any:
        return getattr(self.kept[link], name)

    def of_transport(self, name: str) -> Any:
        return getattr(self.engine, name)

    def send(self, link: int, message: bytes) -> None:
        self.kept[link].send(message)

    def quiesce(self, link: int, timeout_s: float | None) -> int:
        return int(self.kept[link].quiesce(timeout_s))

    def map_shared(self, path: str) -> int:
        return self.keep(np.memmap(path, np.uint8, "r+"))

    def memory(self, handle: int) -> Memory:
        return Memory(int(self.kept[handle].ctypes.data), self.kept[handle].nbytes)

    def expose_shared(self, link: int, handle: int) -> RegionDescriptor:
        return self.kept[link].expose(self.memory(handle)).descriptor

    def expose(self, link: int, length_bytes: int) -> RegionDescriptor:
        return self.expose_shared(link, self.keep(np.zeros(length_bytes, np.uint8)))

    def register(self, handle: int) -> int:
        return self.keep(self.engine.register(self.memory(handle)))

    def connect(self, link: int, address: LinkAddress, window: int, name: str) -> None:
        self.kept[link].connect(address, window=window, name=name)

    def write(self, link: int, write: SingleWrite) -> None:
        self.kept[link].write(replace(write, source=self.kept[write.source]))  # type: ignore[call-overload]

    def close_link(self, link: int) -> None:
        self.kept[link].close()

    def arm(self, imm: Imm, expected: int) -> int:
        handle = self.keep(None)
        self.engine.immediates.arm(imm, expected, lambda _: self.fired_handles.add(handle))
        return handle

    def retarget(self, imm: Imm, expected: int) -> int:
        handle = self.keep(None)
        self.engine.immediates.retarget(imm, expected, lambda _: self.fired_handles.add(handle))
        return handle

    def fired(self, handle: int) -> bool:
        return handle in self.fired_handles

    def received(self, imm: Imm) -> int:
        return self.engine.immediates.received(imm)

    def disarm(self, imm: Imm) -> int:
        return self.engine.immediates.disarm(imm)

    def late(self) -> int:
        return self.engine.immediates.late

    def overflow(self) -> int:
        return self.engine.immediates.overflow

    def stats(self) -> dict[str, int]:
        return self.engine.stats()

    def stream(self, address: LinkAddress, target: RegionDescriptor, block: int, blocks: int, imm: Imm) -> None:
        """Writes all blocks over and over, each round with other bytes, until an error or `stop`."""
        source = np.zeros((blocks, block), np.uint8)
        region = self.engine.register(Memory(int(source.ctypes.data), source.nbytes))
        self.link = self.engine.open_link()
        # More under way at once and `sockets` may stand still: see transport.fabric.profiles.
        self.link.connect(address, window=3 if address.provider == "sockets" else 32, name="receiver")
        order = np.arange(blocks)
        self.stopping = False
        self.transfers: list[Any] = []

        def run() -> None:
            while not self.stopping:
                source[:] = len(self.transfers) % 250 + 1
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

    def last_error(self) -> str | None:
        error = self.transfers[-1].error
        return None if error is None else f"{type(error).__name__}: {error}"

    def stop(self) -> list[tuple[int, int, bool]]:
        """Closes the link; (posted, completed, done) of each transfer."""
        self.stopping = True
        try:
            self.link.close()
        finally:
            self.thread.join()
        return [(t.posted, t.completed, t.done) for t in self.transfers]


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
