"""The official client against a real server."""

from __future__ import annotations

import openai
import pytest

from pdserve.types import SamplingParams
from tests.pdserve.openai.scripted_backend import EOS, MODEL, TOKENIZER, ScriptedBackend, wait_until

USER = [{"role": "user", "content": "hi"}]
UNICODE = "日本語 👨‍👩‍👧‍👦 e\u0301 🇩🇪 क्षि end"


def test_chat(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "ZEBRA QUIZ", "stop")
    prompt = TOKENIZER.apply_chat_template(USER)
    tokens = len(TOKENIZER.encode("ZEBRA QUIZ")) + 1
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), tokens)
    assert answer.usage.total_tokens == len(prompt) + tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.model == MODEL and answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    (request,) = backend.requests
    assert request.prompt == tuple(prompt)
    assert request.sampling == SamplingParams(max_tokens=backend.max_model_len - len(prompt))
    assert backend.cancelled == []


@pytest.mark.parametrize("step_tokens", [1, 3, 100])
def test_chat_stream(client: openai.OpenAI, backend: ScriptedBackend, step_tokens: int) -> None:
    backend.reply, backend.step_tokens = UNICODE, step_tokens
    options = {"include_usage": True}
    stream = client.chat.completions.create(model=MODEL, messages=USER, stream=True, stream_options=options)
    chunks = list(stream)
    *parts, usage = chunks
    assert [part.choices[0].delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
    texts = [part.choices[0].delta.content or "" for part in parts]
    assert "".join(texts) == UNICODE and not any("\ufffd" in text for text in texts)
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert all(part.usage is None for part in parts)
    assert usage.choices == [] and usage.usage is not None
    assert usage.usage.completion_tokens == len(TOKENIZER.encode(UNICODE)) + 1
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_without_usage(client: openai.OpenAI, served: object) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=USER, stream=True))
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)


def test_completion(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    answer = client.completions.create(model=MODEL, prompt="once", max_tokens=3, temperature=0, seed=7)
    assert answer.choices[0].text == TOKENIZER.decode(TOKENIZER.encode("ZEBRA QUIZ")[:3])
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    assert backend.requests[0].prompt == tuple(TOKENIZER.encode("once"))
    assert backend.requests[0].sampling == SamplingParams(max_tokens=3, temperature=0.0, seed=7)


def test_every_sampling_parameter_arrives(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "min_tokens": 2, "stop_token_ids": [9], "ignore_eos": True, "priority": 3}
    client.completions.create(
        model=MODEL, prompt="x", temperature=0.5, top_p=0.9, stop=["a", "b"], seed=-1, user="me", extra_body=extra
    )
    assert backend.requests[0].sampling == SamplingParams(
        max_tokens=16,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=-1,
        stop=("a", "b"),
        stop_token_ids=(9,),
        ignore_eos=True,
    )


def test_default_limit_of_a_completion_gives_way_to_the_context(
    client: openai.OpenAI, backend: ScriptedBackend
) -> None:
    client.completions.create(model=MODEL, prompt=[5] * (backend.max_model_len - 4))
    assert backend.requests[0].sampling.max_tokens == 4


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [TOKENIZER.encode("ab")]),
        (["ab", "c"], [TOKENIZER.encode("ab"), TOKENIZER.encode("c")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_all_forms_of_prompts(
    client: openai.OpenAI, backend: ScriptedBackend, prompt: object, tokens: list[list[int]], stream: bool
) -> None:
    texts: dict[int, str] = {}
    if stream:
        for chunk in client.completions.create(model=MODEL, prompt=prompt, stream=True):  # type: ignore[call-overload]
            texts[chunk.choices[0].index] = texts.get(chunk.choices[0].index, "") + chunk.choices[0].text
    else:
        answer = client.completions.create(model=MODEL, prompt=prompt)  # type: ignore[call-overload]
        texts = {choice.index: choice.text for choice in answer.choices}
        assert answer.usage.prompt_tokens == sum(map(len, tokens))
    assert texts == {index: "ZEBRA QUIZ" for index in range(len(tokens))}
    assert sorted(request.prompt for request in backend.requests) == sorted(tuple(one) for one in tokens)
    assert len({request.request_id for request in backend.requests}) == len(tokens)


def test_max_tokens_zero(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    answer = client.completions.create(model=MODEL, prompt="once", max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(TOKENIZER.encode("once")), 0)
    chunks = list(client.completions.create(model=MODEL, prompt="once", max_tokens=0, stream=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == ["length"]
    assert backend.requests == []
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1"):
        client.chat.completions.create(model=MODEL, messages=USER, max_tokens=0)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_one_token(client: openai.OpenAI, backend: ScriptedBackend, name: str) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, **{name: 1})  # type: ignore[call-overload]
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 1


@pytest.mark.parametrize("step_tokens", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_string(client: openai.OpenAI, backend: ScriptedBackend, stream: bool, step_tokens: int) -> None:
    """Cut before it, finished with `stop`, and the backend is told to stop."""
    backend.reply, backend.step_tokens = "one, two. three" + " and on" * 20, step_tokens
    arguments = {"model": MODEL, "messages": USER, "stop": ". thr"}
    if stream:
        options = {"include_usage": True}
        chunks = list(client.chat.completions.create(stream=True, stream_options=options, **arguments))  # type: ignore[call-overload]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        finish, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
    else:
        answer = client.chat.completions.create(**arguments)  # type: ignore[call-overload]
        text, finish, usage = answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage
    assert (text, finish) == ("one, two", "stop")
    ids = TOKENIZER.encode(backend.reply)
    enough = next(count for count in range(len(ids)) if ". thr" in TOKENIZER.decode(ids[:count]))
    assert usage.completion_tokens == enough
    wait_until(lambda: backend.running == 0)
    assert len(backend.cancelled) == 1 and backend.outputs <= enough


def test_content_parts_and_roles(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    history = {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None}
    messages = [{"role": "developer", "content": "rules"}, history, {"role": "user", "content": parts}]
    client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
    assert TOKENIZER.decode(backend.requests[0].prompt, skip_special=False) == (
        "<|im_start|>system\nrules<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n"
        "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_long_prompt_is_encoded_beside_the_loop(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.max_model_len = 100_000
    text = "日本 hello " * 1000
    client.completions.create(model=MODEL, prompt=text)
    assert backend.requests[0].prompt == tuple(TOKENIZER.encode(text))


def test_models(client: openai.OpenAI, served: object) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "pdserve")
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_the_end_token_is_counted_not_shown(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.reply = ""
    answer = client.chat.completions.create(model=MODEL, messages=USER)
    assert answer.choices[0].message.content == "" and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 1
    assert EOS not in backend.requests[0].sampling.stop_token_ids
