"""Behaviour on the wire: disconnects, headers, health, metrics, tokenizing."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve import __version__
from pdserve.openai import app
from tests.pdserve.openai.scripted_backend import TOKENIZER, ScriptedBackend, Served, wait_until

LONG = "on and on " * 15


def send_request(served: Served, body: dict[str, object]) -> socket.socket:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.sendall(head + content)
    return connection


@pytest.mark.parametrize("prompt", ["x", ["x", "y", "z"]])
def test_disconnect_in_mid_stream_cancels(served: Served, backend: ScriptedBackend, prompt: object) -> None:
    backend.reply, backend.pause_s = LONG, 0.02
    with send_request(served, {"prompt": prompt, "max_tokens": 150, "stream": True}) as connection:
        received = b""
        while received.count(b"data: ") < 3:
            received += connection.recv(4096)
        assert received.startswith(b"HTTP/1.1 200")
    gone = time.monotonic()
    wait_until(lambda: backend.running == 0)
    assert time.monotonic() - gone < 1
    assert len(backend.cancelled) == len(backend.requests) == (1 if prompt == "x" else 3)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_before_the_first_token_cancels(served: Served, backend: ScriptedBackend, stream: bool) -> None:
    backend.pause_s = 30
    with send_request(served, {"prompt": "x", "stream": stream}):
        wait_until(lambda: backend.running == 1)
    wait_until(lambda: backend.running == 0)
    assert len(backend.cancelled) == 1


def test_a_reader_that_stops_reading_and_leaves(served: Served, backend: ScriptedBackend) -> None:
    """The server is blocked in sending when the client goes."""
    backend.max_model_len, backend.reply = 1_000_000, "日本語" * 80_000
    backend.step_tokens = 5  # events are longer than their text: more than the sockets buffer
    with send_request(served, {"prompt": "x", "max_tokens": 900_000, "stream": True}):
        wait_until(lambda: backend.outputs > 0)
        wait_until(lambda: _stands_still(backend))
        assert backend.running == 1
    wait_until(lambda: backend.running == 0)
    assert len(backend.cancelled) == 1


def _stands_still(backend: ScriptedBackend) -> bool:
    before = backend.outputs
    time.sleep(0.1)
    return backend.outputs == before


def test_other_streams_go_on_when_one_client_leaves(
    http: httpx.Client, served: Served, backend: ScriptedBackend
) -> None:
    backend.reply, backend.pause_s = LONG, 0.005

    def whole(index: int) -> str:
        return str(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 150}).text)

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(whole, index) for index in range(3)]
        with send_request(served, {"prompt": "x", "max_tokens": 150, "stream": True}) as connection:
            connection.recv(100)
        texts = [json.loads(answer.result())["choices"][0]["text"] for answer in answers]
    assert texts == [LONG] * 3
    wait_until(lambda: backend.running == 0)
    assert len(backend.cancelled) == 1


def test_stream_headers_and_frames(http: httpx.Client, served: Served) -> None:
    response = http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    *events, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    bodies = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all(body["object"] == "text_completion" for body in bodies)
    assert all(body["choices"][0]["finish_reason"] is None for body in bodies[:-1])
    assert "usage" not in bodies[0]


def test_tokens_are_sent_as_they_come(http: httpx.Client, served: Served, backend: ScriptedBackend) -> None:
    backend.reply, backend.pause_s = "zqzqzqzq", 0.05
    times = []
    with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        for line in response.iter_lines():
            if line:
                times.append(time.monotonic())
    assert times[-1] - times[0] > 0.2


def test_request_id(http: httpx.Client, served: Served) -> None:
    def answered(headers: dict[str, str], path: str = "/version") -> str:
        return str(http.get(path, headers=headers).headers["x-request-id"])

    assert answered({"X-Request-Id": "mine-1"}) == "mine-1"
    assert answered({"X-Request-Id": "mine-2"}, "/nowhere") == "mine-2"
    assert len(answered({})) == 32 and answered({}) != answered({})
    assert len(answered({"X-Request-Id": "x" * 500})) == 32


def test_the_same_request_id_twice_is_two_requests(
    http: httpx.Client, served: Served, backend: ScriptedBackend
) -> None:
    for _ in range(2):
        http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "same"})
    first, second = backend.requests
    assert first.request_id != second.request_id


def test_health(http: httpx.Client, served: Served, backend: ScriptedBackend) -> None:
    response = http.get("/health")
    assert response.status_code == 200
    assert response.json() == {"status": "ready", "detail": {"prefill": 1, "decode": 1}}
    backend.ready = False
    response = http.get("/health")
    assert response.status_code == 503
    assert response.json() == {"status": "unavailable", "detail": {"prefill": 1, "decode": 0}}


def test_health_and_metrics_of_nodes_that_do_not_answer(
    http: httpx.Client, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never() -> str:
        await asyncio.sleep(60)
        return ""

    monkeypatch.setattr(app, "_NODES_ANSWER_S", 0.05)
    monkeypatch.setattr(backend, "health", never)
    monkeypatch.setattr(backend, "metrics_text", never)
    response = http.get("/health")
    assert response.status_code == 503 and "did not answer within" in response.json()["detail"]["error"]
    assert "pdserve:requests_total" in http.get("/metrics").text


def test_version(http: httpx.Client, served: Served) -> None:
    assert http.get("/version").json() == {"version": __version__}


def samples(http: httpx.Client) -> dict[tuple[str, str], float]:
    """(name, outcome) → value, of samples without other labels than endpoint and outcome."""
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            if "le" not in sample.labels:
                found[sample.name, sample.labels.get("outcome", "")] = sample.value
    return found


def test_metrics(http: httpx.Client, served: Served, backend: ScriptedBackend) -> None:
    before = samples(http)
    tokens = len(TOKENIZER.encode("ZEBRA QUIZ")) + 1
    http.post("/v1/completions", json={"prompt": [5, 6, 7], "stream": True})
    http.post("/v1/completions", json={"prompt": [5], "max_tokens": 2})
    http.post("/v1/completions", json={"prompt": ""})
    backend.error_at = 2
    http.post("/v1/completions", json={"prompt": [5], "stream": True})
    backend.error_at, backend.pause_s = None, 30
    with send_request(served, {"prompt": [5]}):
        wait_until(lambda: samples(http)["pdserve:http_requests_in_flight", ""] == 1)
    wait_until(lambda: samples(http)["pdserve:http_requests_in_flight", ""] == 0)
    after = samples(http)

    def grown(name: str, outcome: str = "") -> float:
        return after.get((f"pdserve:{name}", outcome), 0) - before.get((f"pdserve:{name}", outcome), 0)

    for outcome in ("stop", "length", "rejected", "error", "cancelled"):
        assert grown("requests_total", outcome) == 1, outcome
    assert grown("prompt_tokens_total") == 3 + 1 + 1 + 1
    assert grown("generation_tokens_total") == tokens + 2 + 2
    assert grown("time_to_first_token_seconds_count") == 3
    assert grown("inter_token_latency_seconds_count") == (tokens - 1) + 1 + 1
    assert grown("e2e_request_latency_seconds_count") == 2
    assert grown("request_time_per_output_token_seconds_count") == 2
    assert after["pdserve:node_up", ""] == 1


def test_tokenize_and_detokenize(http: httpx.Client, served: Served) -> None:
    text = "日本 🦀"
    answer = http.post("/tokenize", json={"prompt": text}).json()
    assert answer == {"tokens": TOKENIZER.encode(text), "count": len(TOKENIZER.encode(text)), "max_model_len": 200}
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    answer = http.post("/tokenize", json={"messages": messages}).json()
    assert answer["tokens"] == TOKENIZER.apply_chat_template(messages)
    assert http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert http.post("/tokenize", json={}).json()["error"]["message"] == "give either prompt or messages"
