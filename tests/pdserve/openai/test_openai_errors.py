"""Every error has OpenAI's shape, the right status, and names what is at fault."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import openai
import pytest

from pdserve.errors import ContextLengthError, HandoffFailed, NoNodeAvailable, OutOfPages, RequestError
from tests.pdserve.openai.scripted_backend import MODEL, ScriptedBackend, Served

USER = [{"role": "user", "content": "hi"}]


def post(http: httpx.Client, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return http.post(path, content=content)


def fault(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"] and set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"prompt": "\\ud83d"}', "not valid JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_bad_json(http: httpx.Client, served: Served, path: str, body: bytes, message: str) -> None:
    error = fault(post(http, path, body))
    assert message in error["message"] and error["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("extra", "param", "message"),
    [
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": ["a", ""]}, "prompt", "prompt is empty"),
        ({"prompt": [[1], []]}, "prompt", "prompt is empty"),
        ({"prompt": [1, "a"]}, "prompt", "must be a string, a list of strings"),
        ({"prompt": [-1]}, "prompt", "must be a string, a list of strings"),
        ({"prompt": [True]}, "prompt", "must be a string, a list of strings"),
        ({"prompt": None}, "prompt", "must be a string"),
        ({"prompt": [999_999]}, "prompt", "ids go from 0 to"),
        ({"prompt": ["a"] * 257}, "prompt", "at most 256"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"min_p": 2}, "min_p", "less than or equal to 1"),
        ({"seed": 2**70}, "seed", "less than"),
        ({"min_tokens": 17}, "min_tokens", "more than max_tokens"),
        ({"stop": [""]}, "stop", "empty string"),
        ({"stop": 5}, "stop", "a string or a list of strings"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo", "unknown parameter"),
        ({"n": 2}, "n", "not supported"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"echo": True}, "echo", "not supported: leave it out, or give False"),
        ({"logprobs": 0}, "logprobs", "not supported"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "not supported"),
        ({"temprature": 0}, "temprature", "did you mean 'temperature'"),
    ],
)
def test_completion_faults(http: httpx.Client, served: Served, extra: dict[str, Any], param: str, message: str) -> None:
    error = fault(post(http, "/v1/completions", {"model": MODEL, "prompt": "x", **extra}))
    assert error["type"] == "invalid_request_error"
    assert (error["param"], message in error["message"]) == (param, True), error
    assert served.backend.requests == []


@pytest.mark.parametrize(
    ("extra", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hi"}, "messages", "valid list"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "is required"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "'user'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "is required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "list of content parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type",
            "parts of type 'text' only",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages.0.tool_calls",
            "not supported",
        ),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "disagree"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"logprobs": True}, "logprobs", "not supported"),
        ({"n": 2}, "n", "n is not supported: leave it out, or give 1"),
    ],
)
def test_chat_faults(http: httpx.Client, served: Served, extra: dict[str, Any], param: str, message: str) -> None:
    error = fault(post(http, "/v1/chat/completions", {"model": MODEL, "messages": USER, **extra}))
    assert (error["param"], message in error["message"]) == (param, True), error
    assert served.backend.requests == []


def test_parameters_that_ask_for_nothing_pass(http: httpx.Client, served: Served) -> None:
    neutral = {
        "n": 1,
        "logprobs": False,
        "top_logprobs": None,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "user": "me",
        "metadata": {"a": "b"},
        "temperature": None,
        "stream": None,
        "stop": None,
    }
    assert post(http, "/v1/chat/completions", {"messages": USER, **neutral}).status_code == 200


def test_missing_parameter(http: httpx.Client, served: Served) -> None:
    error = fault(post(http, "/v1/completions", {"model": MODEL}))
    assert (error["message"], error["code"]) == ("prompt is required", "missing_required_parameter")


def test_unknown_model(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist; this server has") as caught:
        client.chat.completions.create(model="gpt-9", messages=USER)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True])
def test_beyond_the_context(client: openai.OpenAI, served: Served, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[5] * 190, max_tokens=11, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    for number in ("200 tokens", "201 tokens", "190 in the prompt", "11 for the answer"):
        assert number in caught.value.message
    with pytest.raises(openai.BadRequestError, match="at least 1 for the answer"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "zq" * 300}], stream=stream)
    assert served.backend.requests == []


def test_unknown_path_and_method(http: httpx.Client, served: Served) -> None:
    assert "Not Found" in fault(http.get("/v1/nothing"), 404)["message"]
    assert "Method Not Allowed" in fault(http.get("/v1/completions"), 405)["message"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NoNodeAvailable("no ready decode node"), 503, "no_node_available"),
        (OutOfPages("no free pages"), 503, "out_of_pages"),
        (RequestError("too odd", "prompt"), 400, None),
        (ContextLengthError("too long", "prompt"), 400, "context_length_exceeded"),
        (HandoffFailed("three nodes tried"), 500, "generation_failed"),
        ("the node died", 500, "generation_failed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_backend_errors_before_the_first_token(
    http: httpx.Client, served: Served, error: Exception | str, status: int, code: str | None, stream: bool
) -> None:
    """Also a stream has a proper status then."""
    served.backend.error_at, served.backend.error = 0, error
    response = post(http, "/v1/completions", {"prompt": "x", "stream": stream})
    told = fault(response, status)
    assert (told["message"], told["code"]) == (str(error), code)
    assert ("retry-after" in response.headers) == (status == 503)


def test_unexpected_errors_keep_their_secrets(
    http: httpx.Client, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.backend.error_at, served.backend.error = 0, ZeroDivisionError("secret")
    response = post(http, "/v1/completions", {"prompt": "x"})
    error = fault(response, 500)
    assert "secret" not in response.text and response.headers["x-request-id"] in error["message"]
    assert "secret" in caplog.text


@pytest.mark.parametrize("error", [HandoffFailed("the node died"), "the node died", None])
def test_backend_errors_in_mid_stream(
    http: httpx.Client, client: openai.OpenAI, served: Served, error: Exception | str | None
) -> None:
    """An error event, no finish reason and no [DONE]: never a 200 that looks complete."""
    backend = served.backend
    if error is None:
        backend.ends_early = True
    else:
        backend.error_at, backend.error = 3, error
    with pytest.raises(openai.APIError, match="the node died" if error else "without a finish reason"):
        for chunk in client.completions.create(model=MODEL, prompt="x", stream=True):
            assert chunk.choices[0].finish_reason is None
    text = post(http, "/v1/completions", {"prompt": "x", "stream": True}).text
    *_, last = text.strip().split("\n\n")
    assert "error" in json.loads(last.removeprefix("data: ")) and "[DONE]" not in text


def test_backend_errors_in_a_whole_answer(http: httpx.Client, served: Served) -> None:
    served.backend.error_at = 3
    assert fault(post(http, "/v1/completions", {"prompt": "x"}), 500)["message"] == "the node died"


def test_one_failed_prompt_of_several_ends_all(http: httpx.Client, served: Served, backend: ScriptedBackend) -> None:
    backend.reply, backend.error_at = "x" * 15, 5
    fault(post(http, "/v1/completions", {"prompt": ["a", "b", "c"]}), 500)
    assert backend.running == 0
