"""The worker's side of one link: what goes out, what has come, and its end. Runs on the worker thread only."""

from __future__ import annotations

import logging
import sys
import time
from functools import partial

from transport.api import LinkAddress, Memory, OnMessage
from transport.errors import DescriptorMismatch, LinkClosed, PeerLost, TransportError
from transport.inbox import attempted
from transport.messages import CREDITS, MessageFlow
from transport.outgoing import Outbox, Outgoing, Path
from transport.transfer import TransferState
from transport.ucx import abi, loops
from transport.ucx.binding import Loops
from transport.ucx.channel import Channel
from transport.ucx.context import Context, Region

log = logging.getLogger(__name__)


class LinkEnd:
    """Raises FabricError from its constructor. `pump` raises when the link cannot be used any more."""

    def __init__(self, context: Context, bound: Loops, outbox: Outbox, stall_timeout_s: float) -> None:
        self._context, self._outbox, self._stall_timeout_s = context, outbox, stall_timeout_s
        self.channel = Channel(context, bound)
        self.names, self.rails, self.doorbell = (self.channel.name,), (0,), b""
        self.max_write_bytes = sys.maxsize
        """UCX cuts what is long by itself."""
        self.outgoing = Outgoing(outbox)
        self.flow = MessageFlow()
        self.on_message: OnMessage | None = None
        self.closed = False
        self.revoked = False
        """See `transport.api.Link.revoked`."""
        self._path: Path | None = None
        self._window = 0
        self._welcomed = False
        self._greeted_at = 0.0
        self._regions: list[Region] = []
        self._own_error: TransportError | None = None

    @property
    def peer(self) -> str:
        return self.channel.peer_name

    @property
    def error(self) -> TransportError | None:
        """See `transport.api.Link.error`."""
        return self.outgoing.error or self._own_error

    @property
    def lost_paths(self) -> tuple[str, ...]:
        there = self.peer or "its peer"
        return tuple(f"{self._context.nic or 'UCX'} to {there}: {path.broken}" for path in self.outgoing.lost)

    @property
    def blocked(self) -> bool:
        """Waits for the peer's first answer: the worker must look at the clock."""
        return self._greeting and self.busy

    @property
    def busy(self) -> bool:
        """Something is to be sent or under way."""
        return self.outgoing.busy or self._talking

    @property
    def drained(self) -> bool:
        """Closing has nothing left to wait for."""
        return not self._talking

    @property
    def _greeting(self) -> bool:
        return self.channel.ep != 0 and not self._welcomed

    @property
    def _talking(self) -> bool:
        return self.channel.ep != 0 and (self.flow.wants_to_send or self.channel.sending > 0)

    def check_open(self) -> None:
        """Raises LinkClosed. What is asked of a link may come after it has ended."""
        if self.closed:
            why = f"is broken: {self.error}" if self.error is not None else "is closed"
            raise LinkClosed(f"the link to {self.peer or 'its peer'} {why}")

    def expose(self, memory: Memory) -> tuple[int, tuple[bytes, ...]]:
        """(base, keys). Raises LinkClosed, FabricError, ProviderUnavailable."""
        self.check_open()
        region = self._context.map(memory)
        self._regions.append(region)
        return memory.address, (self.channel.seal(self._context.packed_key(region)),)

    def connect(self, peer: LinkAddress, window: int, name: str) -> None:
        """Raises LinkClosed, FabricError, DescriptorMismatch; nothing is connected then.

        A peer that UCX finds to be gone at once is none of these: it fails the writes, like one found out later.
        """
        self.check_open()
        if len(peer.names) != 1:
            raise DescriptorMismatch(f"the peer's address has {len(peer.names)} names, but UCX needs exactly one")
        lost: PeerLost | None = None
        try:
            self.channel.direct(peer.names[0], max(window, 1), name)
        except PeerLost as error:
            lost = error
        self._window, self._greeted_at = window, time.monotonic()
        (self._path,) = self.outgoing.connect((0,), (0,))
        if lost is not None:
            self._lose(lost)

    def submit(self, transfer: TransferState) -> None:
        self.outgoing.submit(transfer)

    def cancel(self, transfer: TransferState) -> None:
        self.outgoing.cancel(transfer)

    def send(self, message: bytes) -> None:
        if not self.closed:
            self.flow.submit(message)
            self._outbox.messages_sent += 1

    def pump(self) -> bool:
        """Takes what has come and is done, posts, sends messages. True if anything moved. Raises TransportError."""
        if self.closed:
            return False
        moved = self._take(lively=True)
        if self._greeting:
            self._check_stall()
        if self._welcomed and self.channel.ep:
            moved = self._post() or moved
            moved = self._talk() or moved
        return moved

    def begin_close(self) -> bool:
        """Posts nothing more. True if it is worth waiting for messages that are on their way out."""
        healthy = self.outgoing.broken is None and self._welcomed
        self.outgoing.break_off(LinkClosed(f"the link to {self.peer or 'its peer'} was closed"))
        return healthy and self._talking

    def fail(self, error: TransportError) -> None:
        """The link cannot be used: closes, and ends every transfer with `error`. What had completed counts."""
        self._own_error = self._own_error or error
        self.outgoing.break_off(error)
        self.close()

    def close(self) -> None:
        """Closes the sockets, then gives back what was exposed; then every transfer is done. Idempotent.

        Each step is taken whatever the others raise.
        """
        if self.closed:
            return
        self.closed = True
        attempted(partial(self._take, False), "the last reading of a link")
        self.on_message = None
        orderly = self.outgoing.error is None and self._welcomed and not self.outgoing.in_flight
        attempted(partial(self.channel.close_ep, flush=orderly), "closing an endpoint")
        failures = [attempted(self.channel.close, "closing a UCX worker")]
        for region in self._regions:
            failures.append(attempted(partial(self._context.release, region), "giving back what a link exposed"))
        self._regions = []
        self._note_revocation(next((failure for failure in failures if failure is not None), None))
        self.outgoing.abandon()

    def _note_revocation(self, failure: Exception | None) -> None:
        self.revoked = failure is None
        if failure is not None and self._own_error is None:
            text = f"closing the link failed, so its peer may still write to what was exposed: {failure}"
            self._own_error = TransportError(text)

    def _take(self, lively: bool) -> bool:
        """Counts what is complete, and takes what has arrived. `lively`: failures count."""
        pumped = self.channel.poster.pump()
        if len(pumped.tickets):
            self.outgoing.completed(pumped.tickets)
        arrivals = self.channel.arrivals
        imms = arrivals.take_imms()
        if imms is not None:
            self._outbox.imms.append(imms)
        for kind, data in arrivals.take_frames():
            self._take_frame(kind, data)
        damaged = arrivals.take_damaged()
        if damaged:
            log.warning("%d active messages were for another link or protocol and are dropped", damaged)
        if arrivals.overrun:
            raise TransportError("more came at once than a link takes: the peer does not keep to its window")
        if lively:
            self._take_failure(pumped.status)
        return pumped.moved

    def _take_failure(self, status: int) -> None:
        failed = self.channel.settle_sends() if self.channel.sending else 0
        status = self.channel.arrivals.ep_status or status or failed
        if status and self.channel.ep:
            self._lose(self.channel.error("write", status))

    def _take_frame(self, kind: int, data: bytes) -> None:
        if kind == loops.WELCOME:
            self._welcomed = True
        elif kind == loops.REFUSED:
            self._lose(self.channel.error("connect (another process answers there)", abi.UCS_ERR_REJECTED))
        elif kind == loops.FRAGMENT:
            self._take_fragment(data)

    def _take_fragment(self, fragment: bytes) -> None:
        try:
            messages = self.flow.arrived(fragment)
        except ValueError as error:
            raise TransportError(f"the link to {self.peer or 'its peer'} is broken: {error}") from error
        self._outbox.messages_received += len(messages)
        if self.on_message is not None:
            self._outbox.messages.extend((self._hand_over, message) for message in messages)

    def _hand_over(self, message: bytes) -> None:
        """The callback of an earlier message may have closed the link."""
        if self.on_message is not None:
            self.on_message(message)

    def _post(self) -> bool:
        path, moved = self._path, False
        assert path is not None
        while path.next is not None and path.in_flight < self._window:
            part = path.next
            order = part.transfer.order
            try:
                rkey = self.channel.unseal(order.keys[0]) if part.block_bytes else 0
            except TransportError as error:
                self._lose(error)
                return True
            param = order.region.param if isinstance(order.region, UcxSource) else 0
            posted, status = self.channel.poster.post(part, rkey, param, self._window - path.in_flight)
            self.outgoing.posted(path, posted)
            moved = moved or posted > 0
            if status:
                self._lose(self.channel.error("ucp_put_nbx", status))
                return True
            if not posted:
                break
        return moved

    def _talk(self) -> bool:
        moved = False
        while self.channel.sending < CREDITS:
            fragment = self.flow.next()
            if fragment is None:
                break
            moved = True
            status = self.channel.send(loops.FRAGMENT, fragment)
            if status:
                self._lose(self.channel.error("ucp_am_send_nbx", status))
                break
        return moved

    def _check_stall(self) -> None:
        if self.busy and time.monotonic() - self._greeted_at > self._stall_timeout_s:
            self._lose(self.channel.error("connect (the peer does not answer)", abi.UCS_ERR_TIMED_OUT))

    def _lose(self, error: TransportError) -> None:
        """The endpoint is of no more use: what is in flight there fails."""
        self._own_error = self._own_error or error
        if self._path is not None:
            self.outgoing.break_path(self._path, error)
        self.channel.close_ep(flush=False)
        self.outgoing.abandon([self._path] if self._path is not None else [])


class UcxSource:
    """Implements `transport.api.SourceRegion`. `users` are the transfers that read from it."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.users: set[TransferState] = set()
        self.retired = False

    @property
    def memory(self) -> Memory:
        return self.region.memory

    @property
    def param(self) -> int:
        """See `Region`."""
        return self.region.param
