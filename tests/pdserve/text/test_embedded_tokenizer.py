"""The tokenizer of the model that pdserve brings."""

from __future__ import annotations

import pytest

from pdserve.models.embedded import embedded_model_dir
from pdserve.text import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(embedded_model_dir())


def test_special_tokens_and_chat_template(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 49_152)
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    text = tokenizer.decode(tokens, skip_special=False)
    assert text.startswith("<|im_start|>system\n") and text.endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokens[0] == 1 and tokens.count(2) == 2


@pytest.mark.parametrize(
    "text", ["plain", "日本語のテキスト", "👨‍👩‍👧‍👦🏳️‍🌈🇩🇪", "e\u0301 क्षि", "x = 12345 * 678\n\tif y:", "  two  "]
)
def test_deltas_are_whole(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = tokenizer.detokenizer(continues=True)
    parts = [detokenizer.push([token]) for token in tokenizer.encode(text)] + [detokenizer.finish()]
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_a_completion_prompt_gets_nothing_added(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hi", add_special=True) == tokenizer.encode("hi", add_special=False)
