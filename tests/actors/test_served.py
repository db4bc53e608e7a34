"""The OpenAI API over a real cluster, by the official client."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import openai
import pytest

from actors.launch import Cluster
from pdserve.engine.local import generate, local_engine
from pdserve.models.load import load_model
from pdserve.text import Tokenizer
from pdserve.types import GenerationRequest, RequestId, SamplingParams
from policies.sharding import pages_sent
from tests.actors.conftest import eventually, pools_are_whole

TEXTS = ["Hi", "Grüße, 世界! 🌍", "def f(x): return x", "a" * 15, "b" * 16, "c" * 17, "lorem ipsum " * 25]


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def colocated(cluster: Cluster, prompts: dict[str, list[int]], max_tokens: int) -> dict[str, list[int]]:
    settings = cluster.settings.engine
    model = load_model(cluster.model_path, settings.dtype)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    requests = [GenerationRequest(RequestId(name), tuple(tokens), sampling) for name, tokens in prompts.items()]
    with local_engine(model, settings) as engine:
        return {str(name): list(tokens) for name, tokens in generate(engine, requests).items()}


def test_streamed_answers_equal_the_colocated_engine_and_every_immediate_is_counted(
    cluster: Cluster, client: openai.OpenAI
) -> None:
    tokenizer = Tokenizer.from_directory(cluster.model_path)
    prompts = {text: tokenizer.encode(text) for text in TEXTS}
    expected = colocated(cluster, prompts, 24)
    for text, prompt in prompts.items():
        stream = client.completions.create(
            model=cluster.model_name, prompt=prompt, max_tokens=24, temperature=0, stream=True,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        tokens: list[int] = []
        for chunk in stream:
            tokens += chunk.choices[0].token_ids  # type: ignore[attr-defined]
            answer_id = chunk.id
        assert tokens == expected[text]
        request_id = RequestId(f"{answer_id}-0")
        trace = eventually(lambda request_id=request_id: _complete(cluster, request_id), "the trace")
        geometry = cluster.settings.engine.page_size
        assert trace.writes_expected == 6 * pages_sent(len(prompt) - 1, geometry)
        assert trace.writes_counted == trace.writes_posted == trace.writes_expected
    eventually(lambda: pools_are_whole(cluster), "all pages are free")


def _complete(cluster: Cluster, request_id: RequestId):  # type: ignore[no-untyped-def]
    trace = cluster.trace(request_id)
    return trace if trace is not None and trace.timings is not None else None


def test_chat_whole_and_streamed_agree(cluster: Cluster, client: openai.OpenAI) -> None:
    asked = {"model": cluster.model_name, "messages": [{"role": "user", "content": "こんにちは"}], "temperature": 0}
    whole = client.chat.completions.create(**asked, max_tokens=20)
    parts = list(client.chat.completions.create(
        **asked, max_tokens=20, stream=True, stream_options={"include_usage": True}
    ))  # fmt: skip
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert parts[-1].usage == whole.usage
    assert whole.usage is not None and whole.usage.completion_tokens == 20
    assert client.models.list().data[0].id == cluster.model_name


def test_seeded_sampling_repeats_itself(cluster: Cluster, client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        answer = client.completions.create(
            model=cluster.model_name, prompt="seeds", max_tokens=16, temperature=1.0, top_p=0.9, seed=seed
        )
        return answer.choices[0].text

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_max_tokens_zero_and_one(cluster: Cluster, client: openai.OpenAI) -> None:
    none = client.completions.create(model=cluster.model_name, prompt="abc", max_tokens=0)
    assert (none.choices[0].text, none.choices[0].finish_reason) == ("", "length")
    one = client.completions.create(model=cluster.model_name, prompt="abc", max_tokens=1, temperature=0)
    assert one.usage is not None and one.usage.completion_tokens == 1


def test_refusals_name_what_is_wrong(cluster: Cluster, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="abc")
    with pytest.raises(openai.BadRequestError, match="4096"):
        client.completions.create(model=cluster.model_name, prompt=[1] * 5_000)
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.completions.create(model=cluster.model_name, prompt="")
    request = urllib.request.Request(
        f"{cluster.url}/v1/completions", b"{not json", {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 400
    assert "JSON" in json.loads(refused.value.read())["error"]["message"]


def test_a_client_that_leaves_in_mid_stream_gives_its_pages_back(cluster: Cluster) -> None:
    address = urlsplit(cluster.url)
    assert address.hostname and address.port
    body = json.dumps(
        {"model": cluster.model_name, "prompt": "x" * 300, "max_tokens": 3_000, "ignore_eos": True, "stream": True}
    ).encode()
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        received = b""
        while received.count(b"data:") < 3:
            received += connection.recv(4096)
        assert not pools_are_whole(cluster)
    eventually(lambda: pools_are_whole(cluster), "all pages are free")
    eventually(lambda: all(v["num_requests_running"] == 0 for v in cluster.metrics().values()), "nothing runs any more")


def test_health_and_metrics(cluster: Cluster) -> None:
    with urllib.request.urlopen(f"{cluster.url}/health") as answer:
        assert json.loads(answer.read())["status"] == "ready"
    with urllib.request.urlopen(f"{cluster.url}/metrics") as answer:
        text = answer.read().decode()
    assert 'pdserve:kv_transfer_writes_completed_total{node="prefill-0"}' in text
    wires = [line for line in text.splitlines() if line.startswith("pdserve:kv_transfer_wire_info{")]
    assert len(wires) == 3 and all('provider="shm"' in line and 'reason="shm: ' in line for line in wires)
    messages = [line for line in text.splitlines() if line.startswith("pdserve:kv_transfer_messages_sent_total{")]
    assert len(messages) == 3 and all(float(line.split()[-1]) > 0 for line in messages)
    assert 'pdserve:kv_transfer_messages_unreadable_total{node="decode-0"} 0' in text
    assert 'pdserve:kv_transfer_paths_lost_total{node="decode-0"} 0' in text
    assert "pdserve:time_to_first_token_seconds" in text
    assert 'pdserve:kv_cache_quarantined_pages{node="decode-1"} 0' in text
