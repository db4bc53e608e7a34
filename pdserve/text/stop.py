"""Stop strings over a stream of text whose borders fall anywhere."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Passes text through until a stop string is complete, and never lets a part of one out.

    The string whose last character comes first wins, the longest of those that end together: so the result depends on
    the text alone, not on how it was cut. Held back is exactly the longest suffix that may still become a stop string.
    The cost is linear in the text (Knuth-Morris-Pratt, one automaton per string).
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self.matched: str | None = None
        """The stop string that was met; from then on nothing comes out."""

    def push(self, text: str) -> str:
        """The text that is now certain to stand before any stop string."""
        if self.matched is not None:
            return ""
        if not self._patterns:
            return text
        for position, character in enumerate(text):
            complete = [pattern.text for pattern in self._patterns if pattern.advance(character)]
            if complete:
                self.matched = max(complete, key=len)
                before = self._held + text[: position + 1]
                self._held = ""
                return before[: -len(self.matched)]
        return self._release(text)

    def finish(self) -> str:
        """What was held back; the stream has ended."""
        rest, self._held = self._held, ""
        return rest

    def _release(self, text: str) -> str:
        waiting = self._held + text
        certain = len(waiting) - max(pattern.state for pattern in self._patterns)
        self._held = waiting[certain:]
        return waiting[:certain]


class _Pattern:
    """`state` is the length of the longest prefix of `text` that the stream now ends with."""

    __slots__ = ("_borders", "state", "text")

    def __init__(self, text: str) -> None:
        assert text, "an empty stop string matches everywhere"
        self.text = text
        self.state = 0
        self._borders = _borders(text)

    def advance(self, character: str) -> bool:
        """Whether `character` completes the pattern."""
        state = self.state
        while state and self.text[state] != character:
            state = self._borders[state - 1]
        if self.text[state] == character:
            state += 1
        self.state = state
        return state == len(self.text)


def _borders(text: str) -> list[int]:
    """For every prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        if text[index] == text[length]:
            length += 1
        borders[index] = length
    return borders
