"""Stop strings: anywhere, across any borders, nothing of them shown."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pdserve.text import StopStrings

small_text = st.text("abc日", max_size=30)
stop_strings = st.lists(st.text("abc日", min_size=1, max_size=5), min_size=1, max_size=4)


def run(stops: list[str], parts: list[str]) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops)
    shown = [matcher.push(part) for part in parts]
    return [*shown, matcher.finish()], matcher.matched


def cut(text: str, borders: list[int]) -> list[str]:
    points = [0, *sorted(border % (len(text) + 1) for border in borders), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(points)]


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """By trying every end: the first that completes a stop string, the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(stop_strings, small_text, st.lists(st.integers(0, 100), max_size=8))
def test_the_result_does_not_depend_on_the_cuts(stops: list[str], text: str, borders: list[int]) -> None:
    shown, matched = run(stops, cut(text, borders))
    assert ("".join(shown), matched) == expected(stops, text)


@given(stop_strings, small_text)
def test_no_more_is_held_back_than_may_become_a_stop_string(stops: list[str], text: str) -> None:
    matcher, shown, seen = StopStrings(stops), "", ""
    for character in text:
        seen += character
        shown += matcher.push(character)
        if matcher.matched:
            return
        held = seen[len(shown) :]
        suffixes = [seen[start:] for start in range(len(seen) + 1)]
        assert held == next(rest for rest in suffixes if any(s.startswith(rest) and s != rest for s in stops))


def test_a_stop_string_across_deltas() -> None:
    assert run(["</end>"], ["text <", "/e", "nd", "> more"]) == (["text ", "", "", "", ""], "</end>")
    assert run(["</end>"], ["text <", "/e", "x"]) == (["text ", "", "</ex", ""], None)
    assert run(["</end>"], ["text </en"]) == (["text ", "</en"], None)


def test_the_first_to_be_complete_wins() -> None:
    assert run(["abcd", "c"], ["abcd"]) == (["ab", ""], "c")
    assert run(["c", "bc"], ["abcd"]) == (["a", ""], "bc")


def test_a_partial_match_that_overlaps_itself() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", "", ""], "aab")


def test_without_stop_strings_everything_passes() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)
