"""`pdserve doctor --listen` and `--peer`: a verified transfer between two doctors, in both directions.

They say hello, agree on a provider as two nodes would, exchange addresses and descriptors, and write random blocks in
random order into each other's memory; then they time it. Run over tcp and shm; it has not run on RDMA hardware yet.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from base64 import b64decode, b64encode
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from pdserve import __version__
from pdserve.doctor.conversation import SAME_VERSION, Conversation, PeerFailed
from pdserve.doctor.exchange import BLOCK_BYTES, BLOCKS, ROUNDS, TOTAL_BYTES, Exchange
from pdserve.doctor.hello import LOOK, Hello, PeerOptions, agree, own_hello
from pdserve.doctor.report import Check, fail, ok, warn
from pdserve.errors import ConfigError
from transport.api import Transfer
from transport.errors import TransportError
from transport.fabric.profiles import PROFILES
from transport.open import open_transport

DEFAULT_PORT = 18580
TIMEOUT_S = 20.0


def listen(where: str, options: PeerOptions) -> list[Check]:
    """Waits for one peer for as long as it takes; `where` is PORT or HOST:PORT.

    Raises ConfigError, LibraryMissing.
    """
    host, port = parse_address(where if ":" in where else f":{where}")
    mine = own_hello(options)
    try:
        listener = _listener(host, port)
    except OSError as error:
        raise ConfigError(f"--listen: cannot listen on {where}: {error.strerror}; choose another port") from error
    with listener:
        port = listener.getsockname()[1]
        _note(f"listening on port {port}; on the other host: pdserve doctor --peer {mine.reach.name}:{port}")
        while True:
            connection, _ = listener.accept()
            with closing(Conversation(connection, TIMEOUT_S)) as talk:
                try:
                    talk.say("hello", **mine.fields())
                    message = talk.hear("hello")
                except PeerFailed as stray:
                    _note(f"somebody connected, but: {stray.found}; still listening")
                    continue
                return _reported(Meeting(talk, mine, options.library, leads=False), message)


def meet(where: str, options: PeerOptions) -> list[Check]:
    """The transfer with the doctor that listens at HOST or HOST:PORT. Raises ConfigError, LibraryMissing."""
    host, port = parse_address(where)
    if not host:
        raise ConfigError(f"--peer: {where!r} names no host; allowed: HOST or HOST:PORT")
    mine = own_hello(options)
    try:
        connection = socket.create_connection((host, port), timeout=TIMEOUT_S)
    except OSError as error:
        return [fail("peer", f"{host} port {port}: {error.strerror or error}", _unreachable(error, port))]
    with closing(Conversation(connection, TIMEOUT_S)) as talk:
        return _reported(Meeting(talk, mine, options.library, leads=True))


def parse_address(text: str) -> tuple[str, int]:
    """HOST, HOST:PORT, :PORT, [IPv6], [IPv6]:PORT or IPv6 as (host, port). Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.endswith("]")):
        host, port = text, str(DEFAULT_PORT)
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{text!r}: {port!r} is no port; allowed: 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, slots=True)
class Meeting:
    """One conversation from this side. Who `leads` writes first and pings."""

    talk: Conversation
    mine: Hello
    library: str | None
    leads: bool


def _test(meeting: Meeting, message: dict[str, Any] | None) -> list[Check]:
    """`message`: the other side's hello, if it was heard already. Raises PeerFailed, TransportError."""
    talk = meeting.talk
    if message is None:
        talk.say("hello", **meeting.mine.fields())
        message = talk.hear("hello")
    theirs = Hello.of(message)
    choice = agree(meeting.mine, theirs)
    nics = (talk.local_address,) if _by_address(choice.provider) else None
    with Exchange(open_transport(choice.provider, library=meeting.library, nics=nics)) as exchange:
        checks = [_who(talk, theirs), ok("wire", f"{choice.reason}; {exchange.description}")]
        _connect(talk, exchange, theirs.reach.name)
        for writes in (meeting.leads, not meeting.leads):
            checks.append((_write if writes else _receive)(talk, exchange))
        checks.append((_ping if meeting.leads else _answer)(talk, exchange))
        talk.say("bye")
        talk.hear("bye")  # nobody closes while the other one may still wait for a completion
    return checks


def _connect(talk: Conversation, exchange: Exchange, name: str) -> None:
    address, target = exchange.card
    talk.say("card", address=b64encode(address).decode(), target=b64encode(target).decode())
    card = talk.hear("card")
    exchange.connect(_bytes(card, "address"), _bytes(card, "target"), name)
    talk.say("ready")
    talk.hear("ready")


def _write(talk: Conversation, exchange: Exchange) -> Check:
    _await_transfer(talk, exchange.write_verified())
    expected = exchange.sent_sha256()
    talk.say("written", sha256=expected)
    if talk.hear("verified").get("sha256") != expected:
        return _differs("transfer to peer")
    started_s = time.perf_counter()
    for transfer in exchange.write_timed():
        _await_transfer(talk, transfer)
    talk.hear("received")
    rate = _rate(time.perf_counter() - started_s)
    talk.say("rate", rate=rate)
    actual = talk.hear("checked").get("sha256")
    return _moved("transfer to peer", rate) if actual == expected else _differs("transfer to peer")


def _receive(talk: Conversation, exchange: Exchange) -> Check:
    talk.until(exchange.wait_verified, exchange.progress)
    expected, actual = talk.hear("written").get("sha256"), exchange.received_sha256()
    talk.say("verified", sha256=actual)
    if actual != expected:
        return _differs("transfer from peer")
    talk.until(exchange.wait_timed, exchange.progress)
    talk.say("received")  # and hash afterwards: the other side's clock runs
    rate = str(talk.hear("rate").get("rate"))
    actual = exchange.received_sha256()
    talk.say("checked", sha256=actual)
    return _moved("transfer from peer", rate) if actual == expected else _differs("transfer from peer")


def _ping(talk: Conversation, exchange: Exchange) -> Check:
    talk.hear("armed")
    trips_us = [1e6 * trip for trip in exchange.ping(lambda wait: talk.until(wait, lambda: "no answer to a ping"))]
    found = (
        f"median {statistics.median(trips_us):.0f} us, best {min(trips_us):.0f} us, worst {max(trips_us):.0f} us "
        f"({len(trips_us)} immediates there and back, through the worker threads)"
    )
    talk.say("pinged", found=found)
    return ok("round trip", found)


def _answer(talk: Conversation, exchange: Exchange) -> Check:
    exchange.answer_pings()
    talk.say("armed")
    return ok("round trip", str(talk.hear("pinged").get("found")))


def _reported(meeting: Meeting, message: dict[str, Any] | None = None) -> list[Check]:
    """Whatever goes wrong becomes a finding, here and on the other side."""
    try:
        return _test(meeting, message)
    except PeerFailed as error:
        failure = error
    except TransportError as error:
        failure = PeerFailed(str(error), LOOK)
    meeting.talk.tell_failure(failure)
    return [fail("peer", failure.found, failure.advice)]


def _who(talk: Conversation, theirs: Hello) -> Check:
    found = f"{theirs.reach.name} ({talk.peer_address}), pdserve {theirs.version}"
    if theirs.version != __version__:
        return warn("peer", found, f"this side has pdserve {__version__}: run the same version on both")
    return ok("peer", found)


def _await_transfer(talk: Conversation, transfer: Transfer) -> None:
    talk.until(transfer.wait, lambda: f"{transfer.completed} of {transfer.total} writes completed")
    if transfer.error is not None:
        raise PeerFailed(str(transfer.error), f"{LOOK}; --provider tcp on both sides to compare")


def _by_address(provider: str) -> bool:
    """The interface that the conversation goes through is one that reaches the peer."""
    return provider in PROFILES and PROFILES[provider].reach == "network"


def _rate(elapsed_s: float) -> str:
    return f"{ROUNDS * TOTAL_BYTES / elapsed_s / 1e9:.2f} GB/s"


def _moved(name: str, rate: str) -> Check:
    size = f"{BLOCKS} blocks of {BLOCK_BYTES >> 10} KiB"
    return ok(name, f"{size} verified by SHA-256; {rate} over {ROUNDS} rounds more")


def _differs(name: str) -> Check:
    return fail(
        name,
        "the bytes that arrived are not those that were sent",
        "do not use this path: try another --provider, and update libfabric, NIC driver and firmware on both sides",
    )


def _unreachable(error: OSError, port: int) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"nobody listens there: start `pdserve doctor --listen {port}` on that host first"
    if isinstance(error, socket.gaierror):
        return "the name does not resolve: check it, or give the address"
    return f"check the route and the firewall between the hosts (TCP port {port})"


def _bytes(message: dict[str, Any], key: str) -> bytes:
    try:
        return b64decode(message[key], validate=True)
    except (KeyError, TypeError, ValueError) as error:
        raise PeerFailed(f"the other side's card has no {key}", SAME_VERSION) from error


def _listener(host: str, port: int) -> socket.socket:
    if host or not socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError:  # the kernel has IPv6, but it is switched off
        return socket.create_server(("", port))


def _note(text: str) -> None:
    """Not on stdout: that is the report's."""
    print(f"pdserve doctor: {text}", file=sys.stderr, flush=True)
