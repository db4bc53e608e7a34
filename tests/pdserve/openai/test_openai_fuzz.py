"""Whatever the body says, the answer is 200, or a 400 in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.openai.parameters import HARMLESS, UNSUPPORTED
from pdserve.openai.requests import CompletionRequest

text = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    text,
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=3)),
    max_leaves=6,
)
names = st.sampled_from(sorted({*CompletionRequest.model_fields, *UNSUPPORTED, *HARMLESS} - {"model"}))
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": values}),
    max_size=3,
)


def check(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    response = http.post(path, json=body)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]


many = settings(max_examples=100, deadline=None)


@many
@given(
    prompt=st.one_of(text, st.lists(text), st.lists(st.integers(0, 300)), values),
    extra=st.dictionaries(names, values, max_size=3),
)
def test_any_completion(http: httpx.Client, prompt: Any, extra: dict[str, Any]) -> None:
    check(http, "/v1/completions", {"prompt": prompt, **extra})


@many
@given(messages=messages, extra=st.dictionaries(names, values, max_size=2))
def test_any_chat(http: httpx.Client, messages: Any, extra: dict[str, Any]) -> None:
    extra.pop("prompt", None)
    check(http, "/v1/chat/completions", {"messages": messages, **extra})
