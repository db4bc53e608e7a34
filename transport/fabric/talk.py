"""The two-sided messages of one link: they go by one path, and by the next when that breaks. Worker thread only."""

from __future__ import annotations

from transport.api import OnMessage
from transport.errors import TransportError
from transport.fabric.lane import Lane
from transport.fabric.traffic import Route, Traffic
from transport.messages import MessageFlow


class Talk:
    """`chatty`: messages, or acknowledgements of such, wait to be sent."""

    def __init__(self, traffic: Traffic) -> None:
        self.flow = MessageFlow()
        self.on_message: OnMessage | None = None
        self.chatty = False
        self._traffic = traffic
        self._ways: list[tuple[Lane, Route]] = []
        self._way: tuple[Lane, Route] | None = None
        self._fragment: bytes | None = None

    @property
    def busy(self) -> bool:
        """Something is to be sent or on its way out."""
        if self._way is None:
            return False
        return self.flow.wants_to_send or self._fragment is not None or self._way[0].mailbox.sending

    @property
    def due(self) -> bool:
        """`turn` has something to do."""
        return self.chatty or bool(self._traffic.fragments) or self._lost_its_way

    @property
    def _lost_its_way(self) -> bool:
        return self._way is not None and self._way[1].path.broken is not None

    def begin(self, ways: list[tuple[Lane, Route]]) -> None:
        """The link is connected by `ways`, the best first; what has come before may have to be acknowledged."""
        self._ways = ways
        self._choose_way()
        self.chatty = True

    def send(self, message: bytes) -> None:
        self.flow.submit(message)
        self._traffic.outbox.messages_sent += 1
        self.chatty = True

    def repeat(self) -> None:
        """A NIC of this side was lost, and with it perhaps what was on its way in or out."""
        self.flow.repeat()
        self.chatty = True

    def turn(self) -> bool:
        """Takes what has come, sends what waits; True if anything moved. Raises TransportError (damaged message)."""
        moved = bool(self._traffic.fragments)
        self._take()
        if self._lost_its_way:
            self._choose_way()
            self.flow.repeat()
        moved = self._send() or moved
        self.chatty = self._way is not None and (self.flow.wants_to_send or self._fragment is not None)
        return moved

    def end(self) -> None:
        """The link is closed: nothing more is sent, and what has come is not handed over any more."""
        self.on_message = None
        self._way = self._fragment = None
        self._ways = []

    def _choose_way(self) -> None:
        self._fragment = None
        self._way = next((way for way in self._ways if way[1].path.broken is None), None)

    def _take(self) -> None:
        fragments, self._traffic.fragments = self._traffic.fragments, []
        outbox = self._traffic.outbox
        for fragment in fragments:
            try:
                messages = self.flow.arrived(fragment)
            except ValueError as error:
                peer = self._traffic.peer or "its peer"
                raise TransportError(f"the link to {peer} is broken: {error}") from error
            outbox.messages_received += len(messages)
            if self.on_message is not None:
                outbox.messages.extend((self._hand_over, message) for message in messages)

    def _hand_over(self, message: bytes) -> None:
        """The callback of an earlier message may have closed the link."""
        if self.on_message is not None:
            self.on_message(message)

    def _send(self) -> bool:
        moved = False
        if self._way is None:
            return moved
        lane, route = self._way
        while not lane.mailbox.full:
            if self._fragment is None:
                self._fragment = self.flow.next()
            if self._fragment is None or not lane.send(route, self._fragment):
                break
            self._fragment = None
            moved = True
        return moved
