"""This project's transport, whichever implementation `open_transport` gives for the provider."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from pdserve.bench.transport.sides.side import PING_BYTES, PONG_BYTES, Side, now_us
from transport.api import Imm, LinkAddress, Memory, PagedWrite, RegionDescriptor, SingleWrite, Transfer
from transport.open import open_transport

DATA = Imm(1)
MAIL = Imm(2)
EVER = 1 << 40


class EngineSide(Side):
    """Pages are counted under one immediate, pings and wake-ups under another.

    Neither is armed for longer than it is waited for: who has an armed counter polls often, and would disturb others.
    """

    def start(self) -> dict[str, Any]:
        self.transport: Any = open_transport(self.spec.provider, nics=self.spec.nics or None)
        self._on_message: Callable[[], None] = lambda: None
        self.link = self.transport.open_link(lambda _: self._on_message())
        self.immediates = self.transport.immediates
        memory, mail = Memory(self.address, self.memory.nbytes), Memory(self.mail_address, self.mail.nbytes)
        self.source, self.mail_source = self.transport.register(memory), self.transport.register(mail)
        return {
            "about": self.transport.description,
            "modes": ["polled", "callback"] if hasattr(self.transport, "polling") else ["callback"],
            "address": self.link.address.to_bytes(),
            "memory": self.link.expose(memory).descriptor.to_bytes(),
            "mail": self.link.expose(mail).descriptor.to_bytes(),
        }

    def meet(self, other: dict[str, Any]) -> None:
        self.target, self.mail_target = (RegionDescriptor.from_bytes(other[name]) for name in ("memory", "mail"))
        self.link.connect(LinkAddress.from_bytes(other["address"]), window=self.spec.window)

    def prepare(self, kind: Any, block_bytes: int, blocks: int, number: int) -> None:
        super().prepare(kind, block_bytes, blocks, number)
        if not self.spec.sends:
            full = self.full = threading.Event()
            expected = blocks * (self.parts if kind == "single" else 1)
            self.immediates.arm(DATA, expected, lambda _: full.set())

    def send(self) -> None:
        done(self.submit())

    def submit(self) -> list[Transfer]:
        size = self.load.block_bytes
        if self.load.kind == "paged":
            return [self.link.write_paged(self.paged())]
        if self.load.kind == "immediate":
            return [self.link.immediate(self.target, DATA) for _ in range(self.load.blocks)]
        return [
            self.link.write(SingleWrite(self.source, self.target, size, i * size, i * size, DATA, self.parts))
            for i in range(self.load.blocks)
        ]

    def paged(self) -> PagedWrite:
        size = self.load.block_bytes
        return PagedWrite(
            self.source, self.target, size, 0, size, self.source_index, 0, size, self.target_index, DATA
        )  # fmt: skip

    @property
    def parts(self) -> int:
        """A single write is spread over all NICs."""
        return max(1, len(self.spec.nics))

    def receive(self) -> None:
        self.full.wait()
        self.immediates.disarm(DATA)

    def post(self) -> float:
        write = self.paged()
        begun = time.perf_counter()
        transfer = self.link.write_paged(write)
        posted = time.perf_counter() - begun
        done([transfer])
        return posted

    def ping(self, mode: str, count: int) -> list[float]:
        write = SingleWrite(self.source, self.target, PING_BYTES, 0, 0, MAIL)
        return self._ping_polled(write, count) if mode == "polled" else self._ping_called(write, count)

    def pong(self, mode: str, count: int) -> None:
        write = SingleWrite(self.mail_source, self.mail_target, PONG_BYTES, 0, 0, MAIL)
        (self._pong_polled if mode == "polled" else self._pong_called)(write, count)

    def _ping_polled(self, write: SingleWrite, count: int) -> list[float]:
        trips = []
        with self.transport.polling() as poll:
            for number in self._mails(count):
                begun = now_us()
                self.link.write(write)
                poll.wait(MAIL, number)
                trips.append(now_us() - begun)
        return trips

    def _pong_polled(self, write: SingleWrite, count: int) -> None:
        with self.transport.polling() as poll:
            for number in self._mails(count):
                poll.wait(MAIL, number)
                last = self.link.write(write)
            while not last.done:
                poll()

    def _ping_called(self, write: SingleWrite, count: int) -> list[float]:
        trips, back = [], threading.Event()
        ended = 0.0

        def on_full(_: Imm) -> None:
            nonlocal ended
            ended = now_us()
            back.set()

        for number in self._mails(count):
            back.clear()
            self.immediates.retarget(MAIL, number, on_full)
            begun = now_us()
            self.link.write(write)
            back.wait()
            trips.append(ended - begun)
        return trips

    def _pong_called(self, write: SingleWrite, count: int) -> None:
        over = threading.Event()
        numbers = iter(self._mails(count))

        def answer(_: Imm) -> None:
            following = next(numbers, None)
            self.link.write(write, (lambda _: over.set()) if following is None else None)
            if following is not None:
                self.immediates.retarget(MAIL, following, answer)

        self.immediates.retarget(MAIL, next(numbers), answer)
        over.wait()

    def call(self, mode: str, count: int, pause_s: float) -> list[float]:
        stamps = []
        for _ in range(count):
            time.sleep(pause_s)
            stamps.append(now_us())
            if mode == "open":
                self.link.send(b"wake")
            else:
                done([self.link.immediate(self.target, MAIL)])
        return stamps

    def hear(self, mode: str, count: int) -> list[float]:
        stamps: list[float] = []
        over = threading.Event()
        numbers = iter(self._mails(count) if mode == "armed" else range(count))

        def heard(*_: object) -> None:
            stamps.append(now_us())
            following = next(numbers, None)
            if following is None:
                over.set()
            elif mode == "armed":
                self.immediates.retarget(MAIL, following, heard)

        first = next(numbers)
        self._on_message = heard
        if mode == "armed":
            self.immediates.retarget(MAIL, first, heard)
        over.wait()
        return stamps

    def rest(self, mode: str) -> None:
        """`open`: nothing is awaited. `armed`: mail is, as pages are while a handoff is under way."""
        if mode == "armed":
            self.mailed = 0
            self.immediates.arm(MAIL, EVER, lambda _: None)
        else:
            self.immediates.disarm(MAIL)

    def _mails(self, count: int) -> range:
        """What the mail counter reaches by the next `count` of them."""
        first = self.mailed + 1
        self.mailed += count
        return range(first, first + count)

    def close(self) -> None:
        self.transport.close()


def done(transfers: list[Transfer]) -> None:
    """Waits for all; raises the first error."""
    for transfer in transfers:
        transfer.wait()
        if transfer.error is not None:
            raise transfer.error
