from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from pdserve.doctor.conversation import MAX_BYTES, Conversation, NotADoctor, PeerFailed


@pytest.fixture
def pair() -> Iterator[tuple[Conversation, Conversation, socket.socket]]:
    """Two sides, and the second one's socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    with first, second:
        yield Conversation(first, 0.3), Conversation(second, 0.3), second


def test_messages_arrive_whole_and_in_order(pair):
    here, there, _ = pair
    here.say("card", address="x" * 100_000)
    here.say("ready")
    assert there.hear("card")["address"] == "x" * 100_000 and there.hear("ready") == {"kind": "ready"}


def test_silence_and_the_wrong_message_are_told(pair):
    here, there, _ = pair
    with pytest.raises(PeerFailed, match=r"said nothing for 0\.3 s"):
        here.hear("card")
    there.say("bye")
    with pytest.raises(PeerFailed, match="said 'bye' where 'card' was expected"):
        here.hear("card")


@pytest.mark.parametrize(
    "data", [struct.pack("!I", MAX_BYTES + 1), struct.pack("!I", 3) + b"no!", struct.pack("!I", 2) + b"[]"]
)
def test_what_is_no_message_is_not_read(pair, data):
    here, _, raw = pair
    raw.sendall(data)
    with pytest.raises(NotADoctor):
        here.hear("card")


def test_waiting_here_hears_of_a_failure_there(pair):
    here, there, _ = pair
    there.tell_failure(PeerFailed("out of luck", "try again"))
    with pytest.raises(PeerFailed, match="the other side reports: out of luck") as caught:
        here.until(threading.Event().wait, lambda: "nothing came")
    assert caught.value.advice == "try again"


def test_waiting_here_leaves_the_next_message_alone(pair):
    here, there, _ = pair
    there.say("written", sha256="1")
    with pytest.raises(PeerFailed, match=r"nothing came within 0\.3 s"):
        here.until(threading.Event().wait, lambda: "nothing came")
    assert here.hear("written")["sha256"] == "1"


def test_waiting_here_hears_that_the_other_side_is_gone(pair):
    here, there, _ = pair
    there.close()
    with pytest.raises(PeerFailed, match="closed the connection"):
        here.until(threading.Event().wait, lambda: "nothing came")
    here.tell_failure(PeerFailed("too late", "nobody listens"))  # and does not raise
