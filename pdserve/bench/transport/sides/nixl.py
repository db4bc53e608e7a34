"""NIXL with its UCX backend; no progress thread, which is its fast setting where cores are few."""

from __future__ import annotations

import importlib
import os
from importlib.metadata import version
from typing import Any

from pdserve.bench.transport.sides.side import PING_BYTES, PONG_BYTES, Side, now_us


class NixlSide(Side):
    def start(self) -> dict[str, Any]:
        if self.spec.provider == "tcp":
            os.environ["UCX_TLS"] = "tcp"
        nixl = importlib.import_module("nixl_cu12._api")
        self.name = f"bench-{os.getpid()}"
        self.agent = nixl.nixl_agent(self.name, nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        regions = [(array.ctypes.data, array.nbytes, 0, "") for array in (self.memory, self.mail)]
        self.agent.register_memory(regions, "DRAM")
        self.prepared: dict[int, Any] = {}
        return {
            "about": f"NIXL {version('nixl-cu12')}, UCX backend, no progress thread",
            "modes": ["polled"],
            "agent": self.agent.get_agent_metadata(),
            "memory": self.address,
            "mail": self.mail_address,
        }

    def meet(self, other: dict[str, Any]) -> None:
        self.peer = self.agent.add_remote_agent(other["agent"])
        self.peer_memory, self.peer_mail = other["memory"], other["mail"]

    def prepare(self, kind: Any, block_bytes: int, blocks: int, number: int) -> None:
        super().prepare(kind, block_bytes, blocks, number)
        if self.spec.sends and block_bytes not in self.prepared:
            offsets = range(0, self.load.total_bytes, block_bytes)
            here = self.agent.get_xfer_descs([(self.address + o, block_bytes, 0) for o in offsets], "DRAM")
            there = self.agent.get_xfer_descs([(self.peer_memory + o, block_bytes, 0) for o in offsets], "DRAM")
            both = self.agent.prep_xfer_dlist
            self.prepared[block_bytes] = both("NIXL_INIT_AGENT", here), both(self.peer, there)

    def send(self) -> None:
        here, there = self.prepared[self.load.block_bytes]
        handle = self.agent.make_prepped_xfer("WRITE", here, self.source_index, there, self.target_index, b"end")
        self._finish(handle)
        self.agent.release_xfer_handle(handle)

    def receive(self) -> None:
        while not self.agent.get_new_notifs():
            pass

    def ping(self, mode: str, count: int) -> list[float]:
        handle = self._mail(self.address, self.peer_memory, PING_BYTES)
        trips = []
        for _ in range(count):
            begun = now_us()
            self._finish(handle)
            self.receive()
            trips.append(now_us() - begun)
        self.agent.release_xfer_handle(handle)
        return trips

    def pong(self, mode: str, count: int) -> None:
        handle = self._mail(self.mail_address, self.peer_mail, PONG_BYTES)
        for _ in range(count):
            self.receive()
            self._finish(handle)
        self.agent.release_xfer_handle(handle)

    def _mail(self, here: int, there: int, length_bytes: int) -> Any:
        descs = self.agent.get_xfer_descs
        ends = (descs([(address, length_bytes, 0)], "DRAM") for address in (here, there))
        return self.agent.initialize_xfer("WRITE", *ends, self.peer, b"mail")

    def _finish(self, handle: Any) -> None:
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL transfer ended as {state}")
