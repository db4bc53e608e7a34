"""Deltas add up to the whole, and no delta breaks a character."""

from __future__ import annotations

import time

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from pdserve.errors import ModelError
from pdserve.text import Tokenizer
from tests.pdserve.text.small_tokenizers import CORES

HARD = [
    "plain ascii",
    "日本語のテキスト、你好世界",
    "👨‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👩🏽‍🚀 astronaut, 🇩🇪",
    "e\u0301a\u0308\u0323 combining, क्षि, ก็",
    " leading, trailing ",
    "\ufffd a replacement character of its own \ufffd",
    "tabs\tand\nlines\r\n",
    "def f(x):\n    return x  # code",
]
BYTE_LEVEL = Tokenizer(CORES["byte_level"])
SENTENCEPIECE = Tokenizer(CORES["sentencepiece"])
FAMILIES = [BYTE_LEVEL, SENTENCEPIECE]
any_text = st.text(
    st.one_of(st.characters(exclude_categories=("Cs",)), st.sampled_from("日本語👨👩🏽🇩🇪e\u0301\u200d\ufe0f ▁")),
    max_size=60,
)


def deltas(tokenizer: Tokenizer, tokens: list[int], step: int = 1, *, continues: bool = False) -> list[str]:
    detokenizer = tokenizer.detokenizer(continues=continues)
    parts = [detokenizer.push(tokens[start : start + step]) for start in range(0, len(tokens), step)]
    return [*parts, detokenizer.finish()]


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("text", HARD)
def test_hard_texts_come_back_whole(name: str, text: str) -> None:
    tokenizer, core = Tokenizer(CORES[name]), CORES[name]
    tokens = tokenizer.encode(text)
    for step in (1, 2, 3, 7):
        parts = deltas(tokenizer, tokens, step)
        assert "".join(parts) == text == core.decode(tokens) == tokenizer.decode(tokens)
        if "\ufffd" not in text:
            assert not any("\ufffd" in part for part in parts)


@given(any_text, st.sampled_from(FAMILIES), st.integers(1, 5))
def test_deltas_add_up_to_the_text(text: str, tokenizer: Tokenizer, step: int) -> None:
    if tokenizer is SENTENCEPIECE:
        text = text.replace("▁", "")  # its mark for spaces cannot be told from one
    tokens = tokenizer.encode(text)
    parts = deltas(tokenizer, tokens, step)
    assert "".join(parts) == text
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=40))
def test_any_tokens_decode_as_the_library_decodes_them(tokens: list[int]) -> None:
    """Broken characters, special and unknown ids included."""
    core = CORES["byte_level"]
    assert "".join(deltas(BYTE_LEVEL, tokens)) == core.decode(tokens) == BYTE_LEVEL.decode(tokens)
    assert BYTE_LEVEL.decode(tokens, skip_special=False) == core.decode(tokens, skip_special_tokens=False)


@given(st.binary(max_size=40))
def test_broken_byte_tokens_lose_nothing_but_the_broken_characters(data: bytes) -> None:
    tokens = [3 + byte for byte in data]
    assert "".join(deltas(SENTENCEPIECE, tokens, continues=True)) == data.decode(errors="replace")


def test_a_character_waits_for_its_last_byte() -> None:
    tokens = BYTE_LEVEL.encode("🦀")
    assert len(tokens) == 4
    assert deltas(BYTE_LEVEL, tokens) == ["", "", "", "🦀", ""]
    assert deltas(BYTE_LEVEL, tokens[:2]) == ["", "", "\ufffd"]


def test_leading_space_is_kept_only_where_a_text_goes_on() -> None:
    tokens = SENTENCEPIECE.encode("the end")
    assert "".join(deltas(SENTENCEPIECE, tokens)) == "the end"
    assert "".join(deltas(SENTENCEPIECE, tokens, continues=True)) == " the end"
    assert "".join(deltas(SENTENCEPIECE, SENTENCEPIECE.encode("  two"))) == "  two"


def test_cost_is_linear() -> None:
    def seconds(count: int) -> float:
        tokens = BYTE_LEVEL.encode("日本 crab 🦀 ") * count
        deltas(BYTE_LEVEL, tokens[:20])
        start = time.process_time()
        deltas(BYTE_LEVEL, tokens)
        return time.process_time() - start

    small, large = min(seconds(500) for _ in range(3)), min(seconds(5000) for _ in range(3))
    assert large < 30 * small


def test_an_unknown_decoder_is_refused() -> None:
    core = tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    core.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match=r"decoder \['WordPiece'\]; pdserve knows ByteLevel"):
        Tokenizer(core)


def test_metaspace() -> None:
    core = tokenizers.Tokenizer(models.BPE({"▁a": 0, "b": 1, "▁": 2}, []))
    core.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(core)
    assert tokenizer.decode([0, 1, 0]) == "ab a" == core.decode([0, 1, 0])
    assert "".join(deltas(tokenizer, [0, 1], continues=True)) == " ab"


def test_added_tokens_are_plain_text() -> None:
    core = tokenizers.Tokenizer.from_str(CORES["byte_level"].to_str())
    core.add_tokens(["é!"])
    tokenizer = Tokenizer(core)
    assert "".join(deltas(tokenizer, tokenizer.encode("x é!y"))) == "x é!y"
