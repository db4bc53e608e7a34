from __future__ import annotations

import asyncio

from actors.ingress import _continued
from actors.metrics import labelled, node_metrics_text
from actors.streams import OutputStreams
from pdserve.types import FinishReason, GenerationRequest, NodeId, RequestId, SamplingParams, SequenceOutput


def output(name: str, *tokens: int, finish: FinishReason | None = None) -> SequenceOutput:
    return SequenceOutput(RequestId(name), tokens, finish)


def test_a_step_is_one_item_per_replica_and_what_piles_up_is_merged() -> None:
    async def scenario() -> None:
        streams = OutputStreams(asyncio.get_running_loop())
        for name, replica in (("a", "r1"), ("b", "r1"), ("c", "r2")):
            streams.own(RequestId(name), replica)
        streams.emit((output("a", 1), output("c", 2), output("b", 3), output("nobody", 4)))
        await asyncio.sleep(0)
        reading = streams.stream("r1")
        assert await anext(reading) == (output("a", 1), output("b", 3))
        assert await anext(streams.stream("r2")) == (output("c", 2),)
        streams.emit((output("a", 5),))
        streams.emit((output("a", 6, finish=FinishReason.STOP), output("b", 7)))
        await asyncio.sleep(0)
        assert [o.tokens for o in await anext(reading)] == [(5,), (6,), (7,)]
        # A second stream of the same replica takes over, and nothing of a step is lost or sent twice.
        streams.emit((output("b", 8),))
        await asyncio.sleep(0)
        second = streams.stream("r1")
        assert await anext(second) == (output("b", 8),)
        assert [item async for item in reading] == []
        assert streams.expire(60.0) == []
        assert streams.expire(-1.0) == ["b", "c"]
        assert [item async for item in second] == []
        streams.emit((output("b", 9),))  # nobody's any more

    asyncio.run(scenario())


def test_close_ends_every_stream() -> None:
    async def scenario() -> None:
        streams = OutputStreams(asyncio.get_running_loop())
        reading = asyncio.create_task(anext(streams.stream("r1"), None))
        await asyncio.sleep(0)
        streams.close()
        assert await reading is None

    asyncio.run(scenario())


def test_what_was_streamed_becomes_prompt_and_is_not_asked_for_again() -> None:
    asked = GenerationRequest(RequestId("r"), (1, 2), SamplingParams(max_tokens=10, min_tokens=3))
    rest = _continued(asked, [7, 8, 9, 10], 1)
    assert rest.prompt == (1, 2, 7, 8, 9, 10)
    assert (rest.sampling.max_tokens, rest.sampling.min_tokens) == (6, 0)
    assert rest.request_id != asked.request_id
    assert _continued(asked, [], 0) is asked
    # Nothing was streamed, yet the lost node may still have it under the old id.
    assert _continued(asked, [], 1).request_id not in (asked.request_id, _continued(asked, [], 2).request_id)


def test_a_metric_may_have_labels_of_its_own() -> None:
    wire = labelled("wire_info", provider="tcp", reason='a "quoted" {reason}\nof two lines')
    text = node_metrics_text({NodeId("d"): {wire: 1.0, labelled("wire_info", provider="shm"): 1.0}})
    assert text.splitlines() == [
        "# TYPE pdserve:wire_info gauge",
        r'pdserve:wire_info{node="d",provider="tcp",reason="a \"quoted\" {reason}\nof two lines"} 1',
        'pdserve:wire_info{node="d",provider="shm"} 1',
    ]


def test_node_metrics_are_one_family_each() -> None:
    text = node_metrics_text({NodeId("p"): {"steps_total": 3.0, "free": 1.0}, NodeId("d"): {"free": 2.0}})
    assert text.splitlines() == [
        "# TYPE pdserve:free gauge",
        'pdserve:free{node="d"} 2',
        'pdserve:free{node="p"} 1',
        "# TYPE pdserve:steps_total counter",
        'pdserve:steps_total{node="p"} 3',
    ]
