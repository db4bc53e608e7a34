"""The contestants of `pdserve.bench.transport`: each moves pages from one process to another in its own way.

This file is also the program of their processes, and the peers (NIXL, Mooncake) run it with an interpreter that has
them: nothing of this project may be imported at its top.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

WINDOW = 128
IMM = 1
SEED = 5
ROUND_TIMEOUT_S = 60.0
MOONCAKE_BATCH = 1024


class Side:
    """One process of a pair. Subclasses move the pages; `order` is what both sides derive from the round's number."""

    def __init__(self, wire: str, total_bytes: int, sends: bool) -> None:
        self.wire, self.sends = wire, sends
        self.memory = np.zeros(total_bytes, np.uint8)
        self.address = int(self.memory.ctypes.data)

    def order(self, page: int, number: int) -> tuple[Any, Any]:
        rng = np.random.default_rng((SEED, page, number))
        pages = self.memory.nbytes // page
        return rng.permutation(pages), rng.permutation(pages)

    def fill(self, page: int) -> None:
        self.memory[:] = np.random.default_rng((SEED, page)).integers(0, 256, self.memory.nbytes, np.uint8)

    def verify(self, page: int, number: int) -> bool:
        source, target = self.order(page, number)
        sent = np.random.default_rng((SEED, page)).integers(0, 256, self.memory.nbytes, np.uint8).reshape(-1, page)
        return bool((self.memory.reshape(-1, page)[target] == sent[source]).all())

    def start(self) -> Any:
        """What the other side must know; picklable."""
        raise NotImplementedError

    def meet(self, other: Any) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Ends what a killed process would leave behind."""

    def run(self, page: int, number: int) -> None:
        (self.send if self.sends else self.receive)(page, number)

    def send(self, page: int, number: int) -> None:
        raise NotImplementedError

    def receive(self, page: int, number: int) -> None:
        raise NotImplementedError


class EngineSide(Side):
    """pdserve's TransferEngine."""

    def start(self) -> Any:
        from transport.api import Imm, Memory
        from transport.engine import TransferEngine

        self.engine = TransferEngine(self.wire)
        self.link = self.engine.open_link()
        memory = Memory(self.address, self.memory.nbytes)
        if self.sends:
            self.source = self.engine.register(memory)
            return None
        self.expected = 0
        self.engine.immediates.arm(Imm(IMM), 1 << 60, lambda _: None)
        return self.link.address, self.link.expose(memory).descriptor

    def meet(self, other: Any) -> None:
        if self.sends:
            address, self.target = other
            self.link.connect(address, window=WINDOW)

    def send(self, page: int, number: int) -> None:
        from transport.api import Imm, PagedWrite

        source, target = self.order(page, number)
        transfer = self.link.write_paged(
            PagedWrite(self.source, self.target, page, 0, page, source, 0, page, target, Imm(IMM))
        )
        transfer.wait()
        if transfer.error is not None:
            raise transfer.error

    def receive(self, page: int, number: int) -> None:
        import threading

        from transport.api import Imm

        full = threading.Event()
        self.expected += self.memory.nbytes // page
        # Armed since the start: what the sender has written before this line is counted.
        self.engine.immediates.retarget(Imm(IMM), self.expected, lambda _: full.set())
        full.wait()

    def close(self) -> None:
        self.engine.close()


class RawSide(Side):
    """The compiled loops alone: no thread, no queue, no bookkeeping. What the engine could reach at best."""

    def start(self) -> Any:
        from transport.api import Memory
        from transport.dll import load_libfabric
        from transport.fabric.domain import Domain
        from transport.fabric.info import profile_named
        from transport.fabric.posting import Poster, Slots, bind_loops

        self.domain = Domain(load_libfabric(), profile_named(self.wire))
        end = self.endpoint = self.domain.open_endpoint()
        self.poster = Poster(bind_loops("numba"), end.ep, end.writedata, end.cq, end.cq_read)
        self.slots = Slots(min(WINDOW, self.domain.tx_depth))
        memory = Memory(self.address, self.memory.nbytes)
        self.region = self.domain.register_source(memory) if self.sends else self.domain.expose(memory)
        return end.name, self.region.descriptor

    def meet(self, other: Any) -> None:
        if self.sends:
            name, self.target = other
            self.dest = self.endpoint.insert(name)

    def send(self, page: int, number: int) -> None:
        from transport.api import Imm
        from transport.transfer import Order

        source, target = self.order(page, number)
        order = Order(
            None, page, self.address, page, source, self.target.base, page, target, self.target.key, Imm(IMM)
        )  # fmt: skip
        posted = completed = 0
        deadline = time.monotonic() + ROUND_TIMEOUT_S
        while completed < len(source):
            self._check_time(deadline, completed, len(source))
            count, code = self.poster.post(order, self.region.desc, self.dest, posted, 1, self.slots)
            self._check("fi_writedata", code)
            posted += count
            completed += len(self._drained().tickets)

    def receive(self, page: int, number: int) -> None:
        received, expected = 0, self.memory.nbytes // page
        deadline = time.monotonic() + ROUND_TIMEOUT_S
        while received < expected:
            self._check_time(deadline, received, expected)
            received += len(self._drained().imms)

    def _check_time(self, deadline: float, done: int, total: int) -> None:
        """A peer that is gone answers "try again" for ever."""
        if time.monotonic() > deadline:
            raise TimeoutError(f"{done} of {total} pages moved in {ROUND_TIMEOUT_S:.0f} s: the other side is gone")

    def _drained(self) -> Any:
        drained = self.poster.drain(self.slots)
        if drained.code < 0:
            self._check("fi_cq_read", drained.code)
        return drained

    def _check(self, call: str, code: int) -> None:
        """Raises FabricError."""
        from transport.fabric import abi, calls

        if code == -abi.FI_EAVAIL:
            taken, entry = calls.read_error(self.poster.cq)
            call, code = ("write", entry.err) if taken > 0 else ("fi_cq_readerr", taken)
        if code not in (0, -abi.FI_EAGAIN):
            raise calls.fabric_error(self.domain.library, call, code, self.wire, posted=call == "write")

    def close(self) -> None:
        self.endpoint.close()
        self.domain.close()


class NixlSide(Side):
    """NIXL with its UCX backend; no progress thread, which is its fast setting where cores are few."""

    def start(self) -> Any:
        if self.wire == "tcp":
            os.environ["UCX_TLS"] = "tcp"
        nixl = importlib.import_module("nixl_cu12._api")

        self.name = f"bench-{os.getpid()}"
        self.agent = nixl.nixl_agent(self.name, nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self.agent.register_memory([(self.address, self.memory.nbytes, 0, "")], "DRAM")
        self.sides: dict[int, Any] = {}
        return self.agent.get_agent_metadata(), self.address

    def meet(self, other: Any) -> None:
        self.peer = self.agent.add_remote_agent(other[0])
        self.peer_address = other[1]

    def _prepared(self, page: int) -> Any:
        if page not in self.sides:
            offsets = range(0, self.memory.nbytes, page)
            here = self.agent.get_xfer_descs([(self.address + o, page, 0) for o in offsets], "DRAM")
            there = self.agent.get_xfer_descs([(self.peer_address + o, page, 0) for o in offsets], "DRAM")
            prepare = self.agent.prep_xfer_dlist
            self.sides[page] = prepare("NIXL_INIT_AGENT", here), prepare(self.peer, there)
        return self.sides[page]

    def send(self, page: int, number: int) -> None:
        source, target = self.order(page, number)
        here, there = self._prepared(page)
        handle = self.agent.make_prepped_xfer("WRITE", here, source, there, target, b"end")
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL transfer ended as {state}")
        self.agent.release_xfer_handle(handle)

    def receive(self, page: int, number: int) -> None:
        while not self.agent.get_new_notifs():
            pass


class MooncakeSide(Side):
    """Mooncake's transfer engine over its TCP transport. It has no completion at the receiver."""

    def start(self) -> Any:
        self.engine = importlib.import_module("mooncake.engine").TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake does not initialize")
        self.engine.register_memory(self.address, self.memory.nbytes)
        return f"127.0.0.1:{self.engine.get_rpc_port()}", self.address

    def meet(self, other: Any) -> None:
        self.peer, self.peer_address = other

    def send(self, page: int, number: int) -> None:
        source, target = self.order(page, number)
        here = (self.address + page * source).tolist()
        there = (self.peer_address + page * target).tolist()
        for first in range(0, len(here), MOONCAKE_BATCH):  # it refuses larger ones
            batch = slice(first, first + MOONCAKE_BATCH)
            sizes = [page] * len(here[batch])
            if self.engine.batch_transfer_sync_write(self.peer, here[batch], there[batch], sizes) < 0:
                raise RuntimeError("Mooncake transfer failed")

    def receive(self, page: int, number: int) -> None:
        return


SIDES: dict[str, type[Side]] = {"engine": EngineSide, "raw": RawSide, "nixl": NixlSide, "mooncake": MooncakeSide}
PEERS = {"nixl": ("tcp", "shm"), "mooncake": ("tcp",)}


def serve(name: str, wire: str, total_bytes: int, sends: bool) -> None:
    """A child process: pickled (method, arguments) in, pickled answers out."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    side = SIDES[name](wire, total_bytes, sends)
    while True:
        try:
            method, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        try:
            answer = getattr(side, method)(*arguments)
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        pickle.dump(answer, answers)
        answers.flush()
    side.close()
    os._exit(0)  # NIXL crashes in its destructors


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "sends")
