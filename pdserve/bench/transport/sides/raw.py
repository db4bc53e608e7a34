"""The compiled loops alone: no thread, no queue, no bookkeeping. What the engine could reach at best on one NIC."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdserve.bench.transport.sides.side import Side
from transport.descriptors import Memory
from transport.dll import load_libfabric
from transport.fabric import abi, calls
from transport.fabric.endpoint import Endpoint
from transport.fabric.group import open_domains
from transport.fabric.posting import Drained, Poster, Run, bind_loops
from transport.fabric.profiles import profile_named
from transport.fabric.slots import Slots
from transport.imm import Imm
from transport.transfer import Order

IMM = Imm(1)


class RawSide(Side):
    def start(self) -> dict[str, Any]:
        library, profile = load_libfabric(), profile_named(self.spec.provider)
        self.domain, *others = open_domains(library, profile, self.spec.nics[:1] or None)
        for other in others:
            other.close()
        end = self.endpoint = Endpoint(self.domain)
        loops = bind_loops("numba")
        self.poster = Poster(loops, end)
        self.slots = Slots(min(self.spec.window, self.domain.tx_depth))
        memory, mail = Memory(self.address, self.memory.nbytes), Memory(self.mail_address, self.mail.nbytes)
        self.desc, self.mail_desc = (self.domain.register_source(m).desc for m in (memory, mail))
        exposed, mailbox = self.domain.expose(memory), self.domain.expose(mail)
        return {
            "about": f"{loops.kind} loops, libfabric {library.version[0]}.{library.version[1]} from {library.path}",
            "modes": ["polled"] if self.spec.system == "raw-ctypes" else [],
            "name": end.name,
            "memory": [exposed.base, int.from_bytes(exposed.key, "little")],
            "mail": [mailbox.base, int.from_bytes(mailbox.key, "little")],
        }

    def meet(self, other: dict[str, Any]) -> None:
        self.dest = self.endpoint.insert(other["name"])
        (self.target, self.key), (self.mail_target, self.mail_key) = other["memory"], other["mail"]

    def send(self) -> None:
        size, blocks = self.load.block_bytes, self.load.blocks
        order = Order(
            None, size, self.address, size, np.ascontiguousarray(self.source_index),
            self.target, size, np.ascontiguousarray(self.target_index), (), IMM, size,
        )  # fmt: skip
        posted = completed = 0
        while completed < blocks:
            run = Run(order, posted, blocks, size, 1, self.address, self.desc, self.dest, self.key)
            count, code = self.poster.post(run, self.slots)
            self._check("fi_writedata", code)
            posted += count
            completed += len(self._drained().tickets)

    def receive(self) -> None:
        received = 0
        while received < self.load.blocks:
            received += len(self._drained().imms)

    def close(self) -> None:
        self.endpoint.close()
        self.domain.close()

    def _drained(self) -> Drained:
        drained = self.poster.drain(self.slots)
        if drained.code < 0:
            self._check("fi_cq_read", drained.code)
        return drained

    def _check(self, call: str, code: int) -> None:
        """Raises FabricError."""
        if code == -abi.FI_EAVAIL:
            taken, entry = calls.read_error(self.endpoint.cq)
            call, code = ("write", -entry.err) if taken > 0 else ("fi_cq_readerr", taken)
        if code not in (0, -abi.FI_EAGAIN):
            raise self.domain.error(call, code, posted=call == "write")
