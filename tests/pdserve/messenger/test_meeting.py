"""Who works with whom, over which wire; which messages are repeated, void or new."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from pdserve.errors import MeetingRefused
from pdserve.messenger.answers import Answers
from pdserve.messenger.meeting import Transports, WireWish, refusal
from pdserve.messenger.wire import Done, HandoffId, NodeCard
from pdserve.types import Incarnation, NodeId, Role
from policies.layout import KvLayout
from policies.sharding import LayerGroup, ParallelLayout
from transport.api import Memory
from transport.choice import Choice
from transport.loopback import LoopbackTransport

PREFILL = NodeCard(
    node_id=NodeId("p0"),
    incarnation=Incarnation(1),
    role=Role.PREFILL,
    host="here",
    pid=1,
    providers=("shm", "tcp"),
    protocol=1,
    model="toy",
    fingerprint="f",
    dtype="bf16",
    page_size=32,
    kv_layout=KvLayout.HND,
    head_dim=64,
    groups=(LayerGroup(30, 3),),
    parallel=ParallelLayout(),
    max_model_len=2048,
)
DECODE = dataclasses.replace(PREFILL, node_id=NodeId("d0"), incarnation=Incarnation(2), role=Role.DECODE)


def test_equal_nodes_work_together() -> None:
    assert refusal(PREFILL, DECODE) is None
    assert refusal(PREFILL, pickle.loads(pickle.dumps(DECODE))) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol", 2),
        ("fingerprint", "g"),
        ("dtype", "fp32"),
        ("page_size", 16),
        ("kv_layout", KvLayout.NHD),
        ("head_dim", 128),
        ("groups", (LayerGroup(31, 3),)),
    ],
)
def test_a_difference_is_named_with_both_values(field: str, value: object) -> None:
    other = dataclasses.replace(DECODE, **{field: value})  # type: ignore[arg-type]
    said = refusal(PREFILL, other)
    assert said == f"{field} differs: {getattr(PREFILL, field)} at p0 (toy), {value} at d0 (toy)"


def test_other_ranks_are_no_difference_if_they_can_share_the_heads() -> None:
    assert refusal(PREFILL, dataclasses.replace(DECODE, parallel=ParallelLayout(tp=3))) is None
    assert refusal(PREFILL, dataclasses.replace(DECODE, parallel=ParallelLayout(tp=2))) == (
        "3 KV heads cannot be shared by 2 ranks at d0: one number must be a multiple of the other"
    )


def test_roles_must_pair() -> None:
    assert refusal(PREFILL, PREFILL) == "roles do not pair: p0 is prefill, p0 is prefill"


@pytest.mark.parametrize(
    ("configured", "host", "providers", "chosen"),
    [
        ("auto", "here", ("shm", "tcp"), "shm"),
        ("auto", "there", ("shm", "tcp"), "tcp"),
        ("auto", "here", ("tcp",), "tcp"),
        ("tcp", "here", ("shm", "tcp"), "tcp"),
    ],
)
def test_the_wire(configured: str, host: str, providers: tuple[str, ...], chosen: str) -> None:
    theirs = dataclasses.replace(DECODE, host=host, providers=providers)
    choices = {WireWish(configured).choose(*cards).provider for cards in ((PREFILL, theirs), (theirs, PREFILL))}
    assert choices == {chosen}


def test_no_slow_path_in_place_of_the_one_asked_for() -> None:
    """The refusal names the side that lacks it."""
    with pytest.raises(MeetingRefused, match=r"d0.*tcp"):
        WireWish("shm").choose(PREFILL, dataclasses.replace(DECODE, providers=("tcp",)))
    with pytest.raises(MeetingRefused, match=r"d0.*pdserve doctor"):
        WireWish().choose(PREFILL, dataclasses.replace(DECODE, providers=()))
    with_gpus = [dataclasses.replace(card, host=card.node_id, gpus=True) for card in (PREFILL, DECODE)]
    with pytest.raises(MeetingRefused, match="allow_tcp"):
        WireWish().choose(*with_gpus)
    assert WireWish(allow_tcp=True).choose(*with_gpus).provider == "tcp"


def test_one_transport_for_each_provider() -> None:
    buffer = bytearray(64)
    transports = Transports(lambda provider: LoopbackTransport(), Memory(id(buffer), 64))
    one = transports.get(Choice("a", "the first reason"))
    assert transports.get(Choice("a", "another reason")) is one is not transports.get(Choice("b", ""))
    assert (one.reason, transports.opened("a"), transports.opened("c")) == ("the first reason", one, None)
    assert set(transports.stats()) == {"a", "b"} and len(transports.all()) == 2
    transports.close()
    assert not transports.stats()


def test_answers_are_kept_and_what_was_forgotten_is_void() -> None:
    answers = Answers(floor=10, kept=2)
    ids = {number: HandoffId(Incarnation(2), number) for number in (9, 10, 11, 12, 13)}
    done = {number: Done(ids[number], Incarnation(1), 0, None) for number in ids}
    assert answers.void(ids[9]) and not answers.void(ids[10])
    for number in (10, 12, 11):
        answers.put(ids[number], done[number])
    assert answers.get(ids[10]) is None and answers.void(ids[10])
    assert answers.get(ids[11]) is done[11] and not answers.void(ids[11])
    answers.put(ids[13], done[13])  # 12 goes; 11 was answered, and still is
    assert answers.void(ids[12]) and not answers.void(ids[11]) and not answers.void(ids[13])
