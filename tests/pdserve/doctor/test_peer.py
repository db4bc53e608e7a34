"""Two doctors: real processes, real transfers over loopback; and every way in which it can go wrong."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pdserve.doctor import peer
from pdserve.doctor.conversation import Conversation, PeerFailed
from pdserve.doctor.exchange import Exchange
from pdserve.doctor.hello import PROTOCOL, Hello, PeerOptions, agree, own_hello
from pdserve.doctor.report import Check, Status
from pdserve.errors import ConfigError
from transport.choice import Reach
from transport.open import open_transport

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 30.0


class Listener:
    """`pdserve doctor --listen` in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pdserve", "doctor", "--listen", "127.0.0.1:0", "--json", *arguments]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        match = re.search(r"listening on port (\d+)", line)
        assert match, line
        self.port = int(match[1])
        self.stderr = ""

    def connect(self) -> Conversation:
        return Conversation(socket.create_connection(("127.0.0.1", self.port)), TIMEOUT_S)

    def end(self) -> tuple[int, dict[str, dict[str, str]]]:
        """Exit status and findings by name."""
        out, self.stderr = self._process.communicate(timeout=TIMEOUT_S)
        return self._process.returncode, {check["name"]: check for check in json.loads(out)["checks"]}

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture
def listener() -> Iterator[Callable[..., Listener]]:
    made: list[Listener] = []

    def make(*arguments: str) -> Listener:
        made.append(Listener(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


def meet(port: int, provider: str = "auto") -> list[Check]:
    return peer.meet(f"127.0.0.1:{port}", PeerOptions(provider))


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_bytes_are_verified_in_both_directions(listener, provider):
    there = listener()
    mine = {check.name: check for check in meet(there.port, provider)}
    status, theirs = there.end()
    assert status == 0
    assert set(mine) == set(theirs) == {"peer", "wire", "transfer to peer", "transfer from peer", "round trip"}
    assert {check.status for check in mine.values()} == {Status.OK}
    assert mine["wire"].found.startswith(f"{provider}: configured")
    for name, other in (("transfer to peer", "transfer from peer"), ("transfer from peer", "transfer to peer")):
        assert "64 blocks of 64 KiB verified" in mine[name].found and mine[name].found == theirs[other]["found"]
    assert mine["round trip"].found == theirs["round trip"]["found"]


def test_strangers_do_not_end_the_listening(listener):
    there = listener()
    with socket.create_connection(("127.0.0.1", there.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    socket.create_connection(("127.0.0.1", there.port)).close()
    assert all(check.status is Status.OK for check in meet(there.port, "tcp"))
    status, _ = there.end()
    assert status == 0 and there.stderr.count("still listening") == 2


def test_sides_that_were_given_different_providers(listener):
    there = listener("--provider", "sockets")
    (mine,) = meet(there.port, "tcp")
    status, theirs = there.end()
    assert mine.status is Status.FAIL and status == 1
    assert {mine.found, theirs["peer"]["found"]} <= {
        "this side was started with provider tcp, the other one with sockets",
        "this side was started with provider sockets, the other one with tcp",
        "the other side reports: this side was started with provider sockets, the other one with tcp",
    }
    assert "same --provider" in mine.advice


def test_another_protocol_is_refused_by_both_versions(listener):
    there = listener()
    with closing(there.connect()) as talk:
        talk.hear("hello")
        talk.say("hello", protocol=PROTOCOL + 1, version="9.9")
        with pytest.raises(PeerFailed, match=rf"pdserve 9\.9\) speaks protocol {PROTOCOL + 1}, this one {PROTOCOL}"):
            talk.hear("card")
    status, theirs = there.end()
    assert status == 1 and "same version" in theirs["peer"]["advice"]


def test_a_peer_that_vanishes_is_noticed_at_once(listener):
    there = listener()
    with closing(there.connect()) as talk:
        talk.hear("hello")
        talk.say("hello", **own_hello(PeerOptions("tcp")).fields())
        talk.hear("card")
    status, theirs = there.end()
    assert status == 1 and theirs["peer"]["found"].startswith("the other side closed the connection")


def test_a_damaged_card_is_refused(listener):
    there = listener()
    with closing(there.connect()) as talk:
        talk.hear("hello")
        talk.say("hello", **own_hello(PeerOptions("tcp")).fields())
        talk.hear("card")
        talk.say("card", address="AAAA", target="!")
        with pytest.raises(PeerFailed, match="the other side reports: "):
            talk.hear("ready")
    status, theirs = there.end()
    assert status == 1 and theirs["peer"]["status"] == "fail"


def test_bytes_that_differ_are_a_failure(listener):
    """A peer that writes something else than it says."""
    there = listener()
    with closing(there.connect()) as talk:
        talk.hear("hello")
        talk.say("hello", **own_hello(PeerOptions("tcp")).fields())
        with Exchange(open_transport("tcp", nics=("127.0.0.1",))) as exchange:
            peer._connect(talk, exchange, "there")
            assert exchange.write_verified().wait(TIMEOUT_S)
            talk.say("written", sha256="0" * 64)
            assert talk.hear("verified")["sha256"] == exchange.sent_sha256()
            peer._receive(talk, exchange)
            peer._ping(talk, exchange)
            talk.say("bye")
            talk.hear("bye")
    status, theirs = there.end()
    assert status == 1 and theirs["transfer from peer"]["status"] == "fail"
    assert theirs["transfer to peer"]["status"] == theirs["round trip"]["status"] == "ok"


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (check,) = meet(port)
    assert check.status is Status.FAIL and f"start `pdserve doctor --listen {port}`" in check.advice


def test_something_else_listens():
    def serve(server: socket.socket) -> None:
        with server.accept()[0] as connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")
            connection.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), name="a server of another kind")
        thread.start()
        (check,) = meet(server.getsockname()[1])
        thread.join()
    assert check.status is Status.FAIL and check.found == "what was received is no message of pdserve doctor"


def test_a_port_that_is_taken_cannot_be_listened_on():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            peer.listen(f"127.0.0.1:{port}", PeerOptions())


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("node7", ("node7", peer.DEFAULT_PORT)),
        ("node7:7000", ("node7", 7000)),
        (":7000", ("", 7000)),
        ("10.0.0.1", ("10.0.0.1", peer.DEFAULT_PORT)),
        ("fe80::1", ("fe80::1", peer.DEFAULT_PORT)),
        ("[fe80::1]", ("fe80::1", peer.DEFAULT_PORT)),
        ("[fe80::1]:7000", ("fe80::1", 7000)),
    ],
)
def test_addresses(text, address):
    assert peer.parse_address(text) == address


def hello(provider: str, host: str, *providers: str, rdma: tuple[str, ...] = ()) -> Hello:
    return Hello(PROTOCOL, "1", provider, Reach(host, host, providers, rdma))


@pytest.mark.parametrize(
    ("mine", "theirs", "provider"),
    [
        (hello("auto", "a", "tcp", "shm"), hello("auto", "a", "tcp", "shm"), "shm"),
        (hello("auto", "a", "tcp", "shm"), hello("auto", "b", "tcp", "shm"), "tcp"),
        (hello("auto", "a", "tcp", "shm"), hello("tcp", "a", "tcp", "shm"), "tcp"),
        (hello("auto", "a", "efa", "tcp", rdma=("efa",)), hello("auto", "b", "efa", "tcp", rdma=("efa",)), "efa"),
    ],
)
def test_both_sides_agree(mine, theirs, provider):
    assert agree(mine, theirs).provider == agree(theirs, mine).provider == provider
    assert Hello.of(mine.fields()) == mine


def test_a_provider_that_the_other_side_lacks():
    with pytest.raises(PeerFailed, match="sockets"):
        agree(hello("sockets", "a", "tcp", "sockets"), hello("auto", "b", "tcp"))
