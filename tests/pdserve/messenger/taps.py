"""What a test does to messages on their way: whichever way they go, by a link or aside of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pdserve.messenger.codec import decode, encode
from pdserve.messenger.wire import MeetCallback, MeetRequest
from transport.api import Transport
from transport.errors import TransportError

PATIENCE_S = 30.0

Tamper = Callable[[Any, Callable[[Any], None]], None]


class Channel:
    """The way into one node. Whatever is `tamper` sees each message, and may swallow, keep or repeat it.

    What goes aside of the links, and what a tamper delivers once its link is closed, is a direct call.
    """

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.aside: list[Any] = []

    def lead_to(self, deliver: Callable[[Any], None], meet: Callable[..., None] | None = None) -> None:
        self.deliver = deliver
        self._meet = meet
        self.tamper: Tamper | None = None
        self.tamper_meeting: Callable[[MeetRequest, MeetCallback], None] | None = None

    @property
    def meet_now(self) -> Callable[..., None]:
        assert self._meet is not None
        return self._meet

    def meet(self, request: MeetRequest, on_reply: MeetCallback) -> None:
        self.sent.append(request)
        (self.tamper_meeting or self.meet_now)(request, on_reply)

    def send(self, message: Any) -> None:
        self.sent.append(message)
        self.aside.append(message)
        self._pass(message, self.deliver)

    def by_link(self, message: Any, send: Callable[[bytes], None]) -> None:
        """A message on its link, which `send` puts there."""

        def deliver(message: Any) -> None:
            try:
                send(encode(message))
            except TransportError:
                self.deliver(message)

        if self.tamper is None:
            send(encode(message))
            self.sent.append(message)
        else:
            self.sent.append(message)
            self._pass(message, deliver)

    def _pass(self, message: Any, deliver: Callable[[Any], None]) -> None:
        if self.tamper is not None:
            self.tamper(message, deliver)
        else:
            deliver(message)

    def of(self, kind: type) -> list[Any]:
        """What was sent of one kind so far."""
        return [message for message in list(self.sent) if isinstance(message, kind)]

    def mute(self) -> None:
        self.tamper = lambda message, deliver: None
        self.tamper_meeting = lambda request, on_reply: None


class TappedLink:
    """A link whose messages pass by the channel of the node that it leads to."""

    def __init__(self, link: Any, channel_of: Callable[[str], Channel]) -> None:
        self.link = link
        self._channel_of = channel_of
        self._channel: Channel | None = None
        self._refusal: TransportError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)

    def connect(self, peer: Any, *, window: int, name: str = "") -> None:
        self.link.connect(peer, window=window, name=name)
        self._channel = self._channel_of(name)

    def refuse(self, error: TransportError) -> None:
        """Takes no message from now on."""
        self._refusal = error

    def send(self, message: bytes) -> None:
        if self._refusal is not None:
            raise self._refusal
        assert self._channel is not None
        self._channel.by_link(decode(message), self.link.send)


class _TappedTransport:
    def __init__(self, transport: Transport, channel_of: Callable[[str], Channel]) -> None:
        self._transport = transport
        self._channel_of = channel_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def open_link(self, on_message: Any = None) -> TappedLink:
        return TappedLink(self._transport.open_link(on_message), self._channel_of)


def tapped(
    open_transport: Callable[[str], Transport], channel_of: Callable[[str], Channel]
) -> Callable[[str], Transport]:
    return lambda provider: _TappedTransport(open_transport(provider), channel_of)  # type: ignore[return-value]


def drop(*kinds: type) -> Tamper:
    """Loses messages of these kinds."""

    def tamper(message: Any, deliver: Callable[[Any], None]) -> None:
        if not isinstance(message, kinds):
            deliver(message)

    return tamper


class Keep:
    """Holds messages of one kind back until `release`."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._kept: list[tuple[Any, Callable[[Any], None]]] = []
        self.caught = threading.Event()

    def __call__(self, message: Any, deliver: Callable[[Any], None]) -> None:
        if isinstance(message, self._kind):
            self._kept.append((message, deliver))
            self.caught.set()
        else:
            deliver(message)

    def wait(self) -> None:
        assert self.caught.wait(PATIENCE_S)

    def release(self) -> None:
        for message, deliver in self._kept:
            deliver(message)
