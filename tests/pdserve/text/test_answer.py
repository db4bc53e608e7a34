"""One sequence's text: counts, stop strings, the token that ends it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.text import AnswerText, TextDelta, Tokenizer
from pdserve.types import FinishReason, SamplingParams
from tests.pdserve.text.small_tokenizers import CORES

TOKENIZER = Tokenizer(CORES["byte_level"], special={"eos_token": "<|im_end|>"})
EOS = 2


def answer(**sampling: object) -> AnswerText:
    return AnswerText(TOKENIZER.detokenizer(), SamplingParams(**sampling), TOKENIZER.eos_token_id)  # type: ignore[arg-type]


def run(text: AnswerText, tokens: list[int], step: int, finish: FinishReason) -> tuple[str, FinishReason | None]:
    shown = ""
    for start in range(0, len(tokens), step):
        last = start + step >= len(tokens)
        delta = text.push(tokens[start : start + step], finish if last else None)
        shown += delta.text
        if delta.finish:
            return shown, delta.finish
    return shown, None


@given(st.text("ab 日🦀", min_size=1, max_size=30), st.integers(1, 5), st.text("ab 日🦀", min_size=1, max_size=3))
def test_any_text_any_step_any_stop(content: str, step: int, stop: str) -> None:
    tokens = TOKENIZER.encode(content)
    text = answer(stop=(stop,))
    shown, finish = run(text, tokens, step, FinishReason.LENGTH)
    before, found, _ = content.partition(stop)
    assert shown == before
    assert finish is (FinishReason.STOP if found else FinishReason.LENGTH)
    assert stop in TOKENIZER.decode(tokens[: text.tokens]) or not found
    assert stop not in TOKENIZER.decode(tokens[: text.tokens - 1])


def test_a_stop_string_in_mid_step_counts_tokens_up_to_it() -> None:
    tokens = [TOKENIZER.encode(letter)[0] for letter in "xyXYz"]
    text = answer(stop=("XY",))
    assert text.push(tokens, None) == TextDelta("xy", tuple(tokens[:4]), FinishReason.STOP)
    assert text.tokens == 4


def test_the_ending_token_is_counted_and_not_shown() -> None:
    (letter,) = TOKENIZER.encode("x")
    text = answer()
    assert text.push([letter, EOS], FinishReason.STOP) == TextDelta("x", (letter, EOS), FinishReason.STOP)
    assert text.tokens == 2
    text = answer(stop_token_ids=(letter,), stop=("never",))
    assert text.push([letter, letter], FinishReason.STOP).text == "x"
    assert text.tokens == 2
    text = answer(stop_token_ids=(letter,))
    assert text.push([letter], FinishReason.LENGTH).text == "x"


def test_stop_strings_wait_for_min_tokens() -> None:
    tokens = [TOKENIZER.encode("x")[0]] * 5
    text = answer(stop=("x",), min_tokens=3)
    shown, finish = run(text, tokens, 1, FinishReason.LENGTH)
    assert (shown, finish, text.tokens) == ("xx", FinishReason.STOP, 3)


def test_an_unfinished_character_shows_at_the_end() -> None:
    tokens = TOKENIZER.encode("🦀")[:3]
    assert answer().push(tokens, FinishReason.LENGTH).text == "\ufffd"
    assert answer(stop=("\ufffd",)).push(tokens, FinishReason.LENGTH).finish is FinishReason.STOP
